"""ZeRO: sharded modules, counters, optimizer state in files."""
