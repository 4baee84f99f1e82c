"""Whether requests can be joined into one: a proof for each model, by the rules of sharding."""
