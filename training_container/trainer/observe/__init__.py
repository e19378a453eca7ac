"""What a run shows of itself: times, memory, throughput, stragglers, anomalies, profiles."""
