"""List schedulers: m-TOPO, m-ETF and m-SCT."""
