"""headrace moves model weights from where they are stored to where they are used, at the speed of the hardware."""

__version__ = "0.1.0.dev0"
