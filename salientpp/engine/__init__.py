"""An epoch: the ten stages, who drives them, and where a run stopped."""
