# SPDX-License-Identifier: Apache-2.0
"""What the load scenarios in locustfile.py are made of; only `user` needs locust.

numbered   series of numbered tokens that a scripted server recites: the answer is known
questions  what is asked, and what must come back
asks       one request for each door and kind
reply      what came back, and when
http_door, grpc_door   send an ask, read its reply
judge      whether the reply is what it should be
arrivals   when the next request comes
records    what is kept of each request
user       the locust user that all scenarios are
"""
