"""Which layout is fastest: one device, an even split, the best split, packing, placing; measured on one footing. Pure.

`Comparison` has the four calls of `balancer.core.search.Search`, which it embeds, and goes through four stages:
1. scout: the search's own solo and split probes find the batches that fit and the best split (`scout`);
2. grow: trainings are packed on the best device while their combined throughput gains (`pack`);
3. race: every layout in turns A B C A B C, until the ranking is settled (`rank`);
4. knobs: the winner with and without XLA or mixed precision, in turns again.

A global batch that is given is every layout's. Else each layout has the batch that suits it, and packing and placing
take that of the best single device, so that nothing wins by a batch that its rival was not given.

Reading order: layouts, pack, rank, told, purse, scout, comparison, verdict.
"""
