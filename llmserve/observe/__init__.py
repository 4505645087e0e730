"""What is seen of a server from outside: metrics, energy, traces, logs.

access_log     : one line of the log for each request of a client, when its answer is written or its client has gone
counters       : counters and histograms that cost little to count, and all metrics in Prometheus' text format
energy         : energy of the engines in joules
key_usage      : what each key uses of each model
metrics        : the text of /metrics: counts that follow the journal's steps, and numbers that are read at a scrape
part           : what is measured and told of a server
programs_seen  : the programs that run, wait, or are held over a tool call
readings       : what metrics are read from at a scrape
request_counts : counts of requests by the journal: arrivals, starts, ends, and how long they took
run_counts     : counts by model and engine
scrape         : the samples of one reading of /metrics
stream_counts  : counts by model and stream
table          : every metric of /metrics: name, kind, labels, help, and where its numbers come from
traces         : spans of requests, sent by OTLP
watch          : what happens on a live cluster, second by second, for the people who watch it in a browser
"""
