"""`trtrun init`: a first YAML file for this host and the models that it has."""
