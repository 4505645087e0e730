"""Several machines: gateways, groups and engines as processes that Ray places and restarts.

address       : where `llmserve status` and `llmserve down` find the cluster
cluster_file  : cluster.toml: which engines, groups and gateways there are
controller    : keeps the processes in line with the file and the plan
keeper        : runs one of these processes on its node: starts, restarts and reloads it
layout        : which group has which engines, and what changes when the plan does
local_ray     : a Ray of the cluster's own on this machine
on_ray        : the only module that imports Ray: actors and placement
peer_sync     : the exchange with gateways and groups, once a second
peers         : what a server and the controller tell each other: POST /admin/peers
processes     : what to run: the command, files and resources of each engine, group and gateway
quotas        : each gateway's part of the keys' limits
replanning    : plans groups again when the rates at all gateways differ from the plan's
scaling       : how many replicas of an engine run: by the plan, and by the engines that groups want
served_shares : what shares are served, told between groups
store         : what a cluster must not forget, in files

Ray places and restarts these processes, and keeps their descriptions. Requests and tokens go from process to process
by HTTP, and never through Ray.
"""
