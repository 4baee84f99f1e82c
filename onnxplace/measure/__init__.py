"""What is found out by running: rates of links, trials of bundles, comparisons, usage of devices, memory."""
