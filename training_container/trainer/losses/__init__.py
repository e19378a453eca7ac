"""Token-weighted losses: whole, chunked, vocabulary-parallel, and the router's."""
