"""Groups of nodes that share a device, and contracting them."""
