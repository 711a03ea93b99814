srv-engine utime 71 stime 219
voluntary_ctxt_switches:	5690
nonvoluntary_ctxt_switches:	2249
cli random_access 160 242 2 1383
cli terrace-engine 0 8 3634 6
