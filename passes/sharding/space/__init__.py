"""All ways to compute each node on the devices of a group, and what they cost."""
