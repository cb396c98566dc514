"""The way in: a request, the devices and the workload become a job that is checked, once, before anything starts."""
