"""The search for the layout that trains fastest: its rules, its theory, and a reading order.

Rules:

1. The package is deterministic and has no side effects: no clock, file, thread, logging, framework
   or randomness. Time is known only from the seconds that observations report.
2. The next probes depend on the set of observations, not on their order: `tell` adds to the set,
   and everything else is computed from it. Only failures are counted: if the same failure
   is reported twice, these are two attempts.
3. Only measured results are reported.

Theory: a synchronous step of a set A of devices takes

    T = (max over i in A of t_i(b_i)) + c_k,    k = |A|,    throughput = (sum of b_i) / T

where t_i is the compute time (own work) of device i for its share b_i, and c_k is the time of
gradient exchange that isn't hidden behind computation. A share fits if the memory that it needs,
m0_i + m1_i * b_i, is within the device's memory. The best shares follow from t_i and c_k
(`evener.shares.waterfill`): exactly for up to 32 devices, and by a sweep over finish times for
more.

Stages:

1. `solo_stage`: every device runs alone, all at the same time, with two small batches. This gives
   each t_i, and the m0_i and m1_i of its memory use. The next batches to measure are those of the
   layout with the highest upper bound on its throughput, which is the fastest one if each t_i is as
   low as its points allow (`model/lower_bound`). About half of the gain that this layout promises
   turns out to be real; rounds (one probe on each device) continue while that half is worth their
   time. A device that would keep the others waiting for little gain is left out of a round. Devices
   whose times differ by no more than noise share one curve, and so get equal shares. If times rise
   repeatedly by the same jump, the curve is piecewise constant (`model/step_time`), and the best
   batches are the last ones before a jump.
2. `split_stage`: the predicted layout is measured as a real synchronous step. It gives c_k, and one
   more point of each device's curve under contention. Prediction and measurement are repeated until
   nothing new is predicted. For a number of devices that was never measured, c_k is assumed low, so
   that using fewer devices gets tried; for more devices than any split had, c_k is at least the
   exchange time that follows from the speed of the link, if that is known (`model/link_time`). If
   the user set no batch, the smallest split predicted to be within the tolerance of the fastest
   (`smallest_fast_enough`) is raced. A device that may be faster alone than every split is measured
   while the others are idle (stage `rest`); for a fixed batch, this may happen before the first
   split.
3. `race`: every requested family (`balancer/families`) names its candidates, and all are measured
   in turns. They are compared within each turn, so that drift of the machine's speed between turns
   cancels (`ranking`). The best single device always takes part. The number of jobs in a pack grows
   as long as that is faster (`packing`). A candidate gets another turn while it may still gain more
   than 0.2 %; a tie that the rest of the budget can't resolve remains a tie.
4. The rest of the budget may be spent on more exploration, and on racing what that finds. Finally,
   the chosen layout is measured again (stage `check`), because the samples/s for which it was
   chosen may have been high by chance. If the new samples/s are certainly lower than in all turns
   before, the machine has changed, and other layouts may win. The step times of the check and of
   the race are added to the devices' curves, and layouts that become promising are raced too.
   Measurements in which a device was throttled only count if there are no others, or if the device
   remains throttled.

The `turn` of a probe counts rounds in the solo stage and turns in the race. `ranking` orders the
layouts of the race; `best` also considers layouts that only exploration measured.

Rows of unequal length: t_i is the sum of fixed + r * L * (a + b * L) over all passes, for a pass of
r rows padded to L tokens. The coefficients are fitted to passes of a few sizes by non-negative
least squares. Rows are assigned to devices by these costs, as in training
(`evener.training.row_assignment`). `TextModel` models a machine whose row costs depend on length,
and `texts` chooses what to race on it.

The choice: `balance` requests solo, even and split layouts, and `compare` requests all families;
they don't differ otherwise. If the user set no batch, the smallest batch within the tolerance of
the fastest is chosen. For an objective that trades speed for something else, such as energy, the
layout with the best value of the objective is chosen, among layouts at most `max_slowdown` slower
than the fastest. Otherwise, it is the fastest layout, in whichever stage it was measured. A simpler
layout is preferred if it differs by less than 1 %, or by less than the tolerance if that is
smaller. If packs, placements or knobs ran, only layouts of the race may be chosen.

Each module depends only on the ones before it in this list:

- `observations`: what was measured
- `machine_model`, `text_model`: what the observations show about the devices, and the predicted
  duration of a step
- `predictions`: which layouts should be fastest
- `budget`: what a probe costs, and whether there is time for it
- the stages: what to try next
- `rows`, `texts`: which layouts are worth a race
- `family_view`: the data from which families choose; `offers`: the layouts that they offer
- `race`: which of these layouts to measure next
- `evaluation`: the conclusions of all these modules, computed anew after each observation

Reading order: `search` (ask, tell, best, report), `evaluation` (what follows from the
observations), `explore`, `solo_stage`, `split_stage`, `text_stage` (what to try next), `rows` and
`texts` (which layouts are worth a race), `family_view`, `offers`, `race`, `ranking` (which layouts
race, what to measure next, and which layout won), `predictions` and `evener.shares.waterfill`
(which layouts should be fastest), `observations` (the evidence), `machine_model`, `text_model`,
`device_model`, `model/` (curves, memory and exchange, fitted to noisy points), `time_left`,
`starts` and `budget` (time), `decisions` (messages about next steps and the end).

Sources: functional performance models, Lastovetsky and Reddy (HeteroPar 2009): measure near the
solution and solve again. Expected gain: Jones, Schonlau and Welch, "Efficient global optimization"
(1998).
"""
