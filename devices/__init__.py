"""The senses: what is in this machine and how it is doing.

Read `base` for the words, `discover` for what a request means, then its sources: `nvml`, `cpu_source`,
`simulated_source`.
"""
