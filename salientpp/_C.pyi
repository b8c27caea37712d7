# The compiled extension. Importing it registers torch.ops.salientpp (see ops/library.py); the module itself has no names.
