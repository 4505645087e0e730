"""Discovery: engines that are found while the server runs, and gone again.

endpoints  : pure: the URLs that Kubernetes' objects tell of
following  : follows sources of engines, and has the fleet add and remove what they find
kubernetes : Services and InferencePools of Kubernetes, watched through its API
mirror     : pure: a copy of objects of Kubernetes' API, kept by lists and watch events
names      : names of DNS, asked again and again
part       : the sources of a server, from its settings
source     : what a source of engines is
"""
