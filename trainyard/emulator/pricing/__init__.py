"""What an account is told of prices: the Price List, EC2's spot history and capacity blocks, SageMaker's plans.

`offers` holds the rates, which are those of trainyard's dated table until the control endpoint `prices` brings others;
`price_list` and `capacity` make a service's answers of them; `api` puts these where requests come in. All is a function
of the rates, the question and the day. What isn't known here is refused in a line, never answered by a guess.

An answer holds few items, however many were asked for, as every one of these services may give fewer: who ignores the
token of the next page misses prices.
"""
