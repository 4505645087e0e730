"""What is seen of a server from outside: metrics, energy, traces, logs.

table          : every metric of /metrics: name, kind, labels, help, and where its numbers come from
metrics        : the text of /metrics: counts that follow the journal's steps, and numbers that are read at a scrape
counters       : counters and histograms that cost little to count, and all metrics in Prometheus' text format
readings       : what metrics are read from at a scrape
request_counts : counts of requests by the journal: arrivals, starts, ends, and how long they took
stream_counts  : counts by model and stream
run_counts     : counts by model and engine
key_usage      : what each key uses of each model
energy         : energy of the engines in joules
energy_meters  : creates a server's energy meters
scrape         : the samples of one reading of /metrics
access_log     : one line of the log for each request of a client, when its answer is written or its client has gone
traces         : spans of requests, sent by OTLP
watch          : what happens on a live cluster, second by second, for the people who watch it in a browser
"""
