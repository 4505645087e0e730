"""What is seen of a server from outside: metrics, energy, traces, logs.

access_log    : one line of the log for each request of a client, when its answer is written or its client has gone
counters      : counters and histograms that cost little to count, and to write in Prometheus' text format
energy        : energy of the engines in joules
energy_meters : creates a server's energy meters
gauges        : metrics of the scheduler, the engines' energy and the dispatch plans, read at the time of a scrape
metrics       : the Prometheus metrics of `/metrics`
run_metrics   : metrics by model and engine
scrape        : the samples of one reading of /metrics
traces        : spans of requests, sent by OTLP
watch         : what happens on a live cluster, second by second, for the people who watch it in a browser
"""
