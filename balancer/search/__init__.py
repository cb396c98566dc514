"""The search for the layout that trains fastest: rules, theory, and the order in which to read it.

Rules. (1) Everything here is pure: no clock, file, thread, logging, framework or randomness. Time comes in as
the seconds that observations say they took. (2) What is asked next is a function of the set of observations, not of
their order: `tell` adds to the set, everything else is computed from it. Only failures are counted: telling one twice
counts as two tries. (3) Only what was measured is reported.

Theory. A synchronous step of the devices A takes

    T = max over i in A of t_i(b_i) + c_k,    k = |A|,    throughput = sum of b_i / T

with t_i the device's own time for its share b_i, and c_k the time of gradient exchange that isn't hidden behind
computation. A share fits while m0_i + m1_i * b_i is within the device's memory. From t_i and c_k the best shares follow
(`evener.shares.waterfill`): exactly for up to 32 devices, by a sweep over finish times beyond.

1. `solo_stage`: every device alone, all at the same time, two small batches. This gives each t_i and memory line. Then
   the layout that would be fastest if each t_i were as fast as its points allow (`model/hope`) says which batches to
   measure, while half of the expected gain pays for their time. A device that would keep the others waiting for little
   is left out of a round. Devices whose times differ by no more than noise share one curve, hence equal shares. Times
   that rise by the same jump again and again are stairs (`model/step_time`), whose ends are the batches to train with.
2. `split_stage`: the predicted layout is measured as a real synchronous step. It gives c_k and one more point of every
   curve under contention; the prediction is repeated until it says nothing new. For a number of devices never measured,
   c_k is assumed low, so that using fewer devices gets tried. Of a free batch, the smallest split that is
   predicted to be within the tolerance of the fastest (`within`) is raced. A device that may beat every split alone
   is measured while the others are idle (stage `rest`); of a fixed batch that may come before the first split.
3. `race`: every family that was asked for (`balancer/families`) names its candidates, and all are measured in turns.
   They are compared within each turn, so drift cancels (`ranking`). The best single device always takes part. Packs of
   several trainings grow while they gain (`packing`). A candidate gets another turn while it may still gain
   more than 0.2 %; a tie that the rest of the budget can't resolve is a tie.
4. What is left of the budget may explore once more, and what that finds races. At last the chosen layout is measured
   again (stage `check`): the reported figure is one that had no part in choosing it. If it is surely lower than all
   turns before, the machine has changed, and others may win. What its devices took, then and in the race, adds to
   their curves; what gains by that races too. Measurements of throttled devices count little.

The `turn` of a probe counts rounds in the solo stage and turns in the race. `ranking` orders the layouts of the race;
`best` also considers those that only exploration measured.

Rows of unequal length: t_i is the sum over passes of fixed + r * L * (a + b * L) for r rows padded to L tokens, fitted
to passes of a few sizes by least squares, nothing negative. Batches are assigned by these costs as in the training
(`evener.training.dealing`). `TextModel` is the machine whose rows cost by their length, `texts` what to race on it.

`balance` asks for solo, even and split layouts, `compare` for all families; nothing else differs. If the batch is
free, the smallest within the tolerance of the fastest is chosen; for an objective that trades speed, the layout with
most of it that is at most `max_slowdown` slower. Otherwise the fastest is chosen, whichever stage measured it, or a
simpler one that is less than 1 % from it, or less than the tolerance if that is smaller. The choice is among the
layouts of the race only if packs, placements or other knobs ran.

Each asks only those before it. `observations`: what was seen. `machine_model` or `text_model`: what is known by it, and what
a step costs. `predictions`: what should be fastest. `budget`: what a probe costs, by what is known, and whether there is time.
The stages: what to try next. `rows` or `texts`: what is worth a race. `family_view`: what families choose by; `offers`: what
they offer. `race`: which of it to measure next.
`evaluation`: what all of them say after one observation, made anew after each.

Reading order: `search` (ask, tell, best, report), `evaluation` (what follows from the observations),
`explore`, `solo_stage`, `split_stage`, `text_stage` (what to try next),
`rows` and `texts` (which layouts are worth a race),
`family_view`, `offers`, `race`, `ranking` (who races, what to measure next, and who won), `predictions` and `evener.shares.waterfill`
(which layouts should be fastest), `observations` (the evidence), `machine_model`, `text_model`, `device_model`, `model/`
(curves, memory, exchange of noisy points), `time_left`, `starts` and `budget`, `decisions` (the same in words).

Sources: functional performance models, Lastovetsky and Reddy (HeteroPar 2009): measure near the solution and solve
again. Expected gain: Jones, Schonlau and Welch, "Efficient global optimization" (1998).
"""  # noqa: E501
