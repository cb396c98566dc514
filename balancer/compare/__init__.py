"""Which layout is fastest: one device, an even split, the best split, packing, placing; measured on one footing. Pure.

`Comparison` has the four calls of `balancer.core.search.Search`, which it embeds, and goes through five stages:
1. scout: the search's own solo and split probes find the batches that fit and the best split (`scout`);
2. once: every wanted layout is measured, the cheapest first, so that a short budget leaves out as few as it can;
3. grow: trainings are packed on the best device while their combined throughput gains (`pack`);
4. race: every layout in turns A B C A B C, until the ranking is settled (`rank`);
5. knobs: the winner with and without XLA or mixed precision, in turns again.

A global batch that is given is every layout's. Else each layout has the batch that suits it, and packing and placing
take that of the best single device, so that nothing wins by a batch that its rival was not given. Under a budget no
free batch is tried whose steps are too long for one probe of every layout to be paid (`ration`).

Reading order: layouts, pack, packing, rank, told, costs, purse, ration, scout, entrants, comparison, verdict.
"""
