"""How the batches of a loader are drawn. A way of drawing is one file with a :class:`~salientpp.engine.drawing.method.DrawingMethod`."""
