"""Training of drafters for a frozen target: `trtrun train-drafter`.

Plain torch and transformers' model classes, because engines have no gradients. It knows files, tensors and a
communicator; it does not know how a round drafts, how ranks are started, or the command line.
"""
