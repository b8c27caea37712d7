# The compiled extension: importing it fills torch.ops.salientpp (see ops.py); it has no names of its own.
