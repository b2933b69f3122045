"""Draft heads of targets: layouts of their files, plans and layers. Importing this package registers every layout."""

from trtrun.heads import dflash_layouts, eagle_layouts, medusa_layouts, mtp_layouts
from trtrun.heads.assistants import assistant_layouts

__all__ = ["assistant_layouts", "dflash_layouts", "eagle_layouts", "medusa_layouts", "mtp_layouts"]
