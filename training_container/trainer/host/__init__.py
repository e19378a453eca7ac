"""What the entrypoint does on one host: rendezvous, ranks, watching, recovery. No torch."""
