"""A fleet in one simulation: gateways, serving groups with the real schedulers, engines, nodes and racks that die.

    layout     pools of models and their groups; engines, nodes and racks; what dies when
    traffic    the requests of each second: a day's curve, and bursts of single keys
    gateway       which group gets a request; what happens to a request whose group is lost
    group      one serving group: a scheduler, its engines, its deaths and restarts
    counters   what shares were served, told to the other groups of their pool once a second
    rounds     all of them in rounds of one second, in one process or several; the results

Within a round nothing passes between groups, so groups are simulated one after another, and in any process. At the
end of a round each group reports to the gateways: what ended, what its gateways must send elsewhere, its load, and what
it served to whom. So a gateway knows a group's load, and a group what the other groups of its pool served, of up to one
second ago. A request that needs another group gets it in the next round.
"""
