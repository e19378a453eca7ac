"""Attention that sees few positions of a long sequence: those that an indexer chooses, or entries that many positions
are compressed into.

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1) and GLM-5 choose among all positions, under latent attention. DeepSeek-V4
(section 2 of its report) sees the last positions one by one and all before them in entries of few positions, chosen, or
of many; its residual is several streams wide, which every block reads from and adds to by weights of their own.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Indexer:
    """What chooses the positions (or entries) that attention sees."""

    heads: int
    head_dim: int
    chosen: int
    """Entries that a token sees, at most."""
    layers: int
    """Layers that have one; others see what the last one before them chose."""
    rate: int = 1
    """Positions that an entry stands for."""

    def params(self, hidden: int, query_latent: int) -> int:
        """One indexer over plain positions: queries from attention's latent, a key with its norm, a weight a head."""
        width = self.heads * self.head_dim
        return query_latent * width + hidden * (self.head_dim + self.heads) + 2 * self.head_dim

    def flops_per_token(self, sequence_length: float) -> float:
        """Of scoring all entries forward, causality not counted, in one layer."""
        return 2.0 * self.heads * self.head_dim * sequence_length / self.rate

    def mean_span(self, sequence_length: float) -> float:
        """Entries that a token sees, the mean over a sequence, times two: as if causality were not counted.

        Token t has t/rate entries behind it, of which it sees at most those chosen.
        """
        entries = sequence_length / self.rate
        if entries <= self.chosen:
            return entries
        return self.chosen * (2.0 - self.chosen / entries)


@dataclass(frozen=True)
class Compression:
    """DeepSeek-V4's attention: one key that is the value too, for all heads, and what stands before a short window."""

    window: int
    chosen_layers: int
    """Layers that see entries of few positions, those that an indexer chooses (`Indexer.rate` positions each)."""
    heavy_layers: int
    """Layers that see entries of many positions, all of them. The others see the window alone."""
    heavy_rate: int
    output_groups: int
    """Groups of heads whose results are each projected to `output_rank` before all of them are to the hidden size."""
    output_rank: int
    streams: int
    """Residual streams, each as wide as the hidden size (hyper-connections)."""

    def attention_params(self, hidden: int, heads: int, head_dim: int, query_latent: int) -> int:
        """Of one layer, without what compresses: queries through their latent, the key, the result's two matrices, the
        norms of latent and key, a sink a head."""
        queries = query_latent * (hidden + heads * head_dim + 1)
        output = self.output_rank * (heads * head_dim + self.output_groups * hidden)
        return queries + hidden * head_dim + head_dim + output + heads

    def compressor_params(self, hidden: int, head_dim: int, indexer: Indexer, query_latent: int) -> int:
        """Of all layers: what makes entries (values, gates, a bias for each place, a norm), twice as wide where windows
        overlap, and the indexers, whose keys are compressed alike."""

        def entries(width: int, rate: int, *, series: int) -> int:
            return series * width * (2 * hidden + rate) + width

        chosen = entries(head_dim, indexer.rate, series=2) + entries(indexer.head_dim, indexer.rate, series=2)
        chosen += query_latent * indexer.heads * indexer.head_dim + hidden * indexer.heads
        return self.chosen_layers * chosen + self.heavy_layers * entries(head_dim, self.heavy_rate, series=1)

    def stream_params(self, hidden: int, layers: int) -> int:
        """Of all layers and the head: what makes the weights of streams from the streams."""
        weights = self.streams * (self.streams + 2)
        site = weights * (self.streams * hidden + 1) + 3
        head = self.streams * (self.streams * hidden + 1) + 1
        return 2 * layers * site + head

    def mean_span(self, sequence_length: float, layers: int, indexer: Indexer) -> float:
        """Positions and entries that a token sees, the mean over layers, causality not counted: a window has no causal
        half, which is why it counts twice."""
        window = min(2.0 * self.window, sequence_length)
        chosen, heavy = self.chosen_layers * indexer.mean_span(sequence_length), self.heavy_layers * sequence_length
        return window + (chosen + heavy / self.heavy_rate) / layers
