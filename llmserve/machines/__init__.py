"""Several machines: doors, groups and engines as processes that Ray places and restarts.

    cluster_file  cluster.toml: which engines, groups and doors there are
    processes     what to run: the command, files and resources of each engine, group and door
    keeper        runs one of these processes on its node: starts, restarts and reloads it
    layout        which group has which engines; what changes when the plan does
    exchange      with doors and groups, once a second
    quotas        each door's part of the keys' limits
    shares        what shares are served, told between groups
    scaling       how many replicas of an engine run: by the plan, and by the engines that groups want
    controller    keeps the processes in line with the file and the plan
    on_ray        the only module that imports Ray: actors, placement, the store

Ray places and restarts these processes, and keeps their descriptions. Requests and tokens go from process to process by
HTTP, and never through Ray.
"""
