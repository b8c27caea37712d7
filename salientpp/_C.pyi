# The compiled extension: importing it fills torch.ops.salientpp (see ops/library.py); it has no names of its own.
