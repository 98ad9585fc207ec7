# ping.sh SECONDS: waits, says where the work stands, and brings the small files and, if given, parts of the weights
sleep $1; cp /tmp/small.tgz $OUT/ 2>/dev/null
. /tmp/gpu/env.sh; tail -n 8 $O/log.txt; tail -n 4 $O/student*/job.log | cut -c1-220; tail -qn 1 $O/student*/run-*.txt | cut -c1-160
for p in ${@:2}; do cp /tmp/weights/$p $OUT/; done; ls -la $OUT; ls /tmp/weights 2>/dev/null | tr '\n' ' '
