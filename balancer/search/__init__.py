"""The search for the layout that trains fastest. Rules, theory, and the order in which to read it.

Rules. (1) Everything here is pure: no clock, file, thread, logging, framework, or randomness. Time comes in as the
seconds that observations say they took. (2) What is asked next is a function of the set of observations, not of their
order: `tell` adds to that set, everything else is read from it anew. (3) Only what was measured is reported.

Theory. A synchronous step of the devices A takes

    T = max over i in A of t_i(b_i) + c_k,    k = |A|,    throughput = sum of b_i / T

with t_i the device's own time for its share b_i, which rises with b_i (straight, flat up to a knee, or in stairs), and
c_k the exposed cost of keeping k replicas in step. A share fits while m0_i + m1_i * b_i is within the device's memory.

1. `solo`: every device alone, all at the same time: two small batches, the largest that matters (by way of one between
   if it is far), and a fourth where the curve or the memory line was refuted. Where samples/s fell from a batch to a
   larger one, up to two more look for their peak. Devices that noise can't tell apart share one curve, hence equal
   shares.
2. `fill`: for a fixed global batch, the shares that end together; for a free one, the best finish time. For a given
   finish time the best k devices are those that can do most, so sorting replaces the enumeration of subsets. Among
   layouts within the tolerance of the fastest, the smallest global batch.
3. `split`: the predicted layout is measured as a real synchronous step. It gives c_k, and one more point of every curve
   under contention; the fill is repeated, until it says nothing new. Numbers of devices not yet tried are believed
   cheap, so that leaving devices out is tried where it could pay. Of stairs, each share is put on the likeliest edge,
   and a device's own time says on which side of it the share lies: every split halves what is not known of all edges.
   With one device, a batch that is predicted to gain is measured here instead.
4. `race`: the favourites, the even split and the best single device in turns, judged side by side. Of stairs, the
   layout that no doubt can slow and the one that likely is faster both take part. What was measured to be faster than
   all of them turn out to be joins after their first turn: a prediction that fails doesn't hide it.

Reading order: `search` (ask, tell, best, why_stopped), `solo`, `peak`, `split`, `race` (what to measure next), `view`
(which layouts are worth it), `known` (what the evidence says), `ledger` (the evidence), `fill` (the exact solution),
`points`, `line`, `curve`, `stairs`, `memory`, `sync`, `alike` and `beside` (what is learnt from noisy points), `stop`
(budget and stopping rules), `stats`, `check`; `drive` is the loop.

Sources: functional performance models, Lastovetsky and Reddy (HeteroPar 2009): measure near the solution and solve
again. HPOPTA, Khaleghzadeh and others (TPDS 2018): exact partition for rough curves. Birge ratio: Physical Review 40
(1932), 207.
"""
