# fetch.sh SECONDS: waits until SECONDS after the start, or until all is done, then brings the results
. /tmp/gpu/env.sh
while [ $(( $(date +%s) - $(cat /tmp/began) )) -lt $1 ] && [ ! -e /tmp/alldone ]; do sleep 2; done
tail -25 $O/log.txt; tail -qn 2 $O/*.log | cut -c1-200 | tail -30
tar czf $OUT/out.tgz -C /tmp/out . ; ls -la $OUT
