# collect.sh: every 20 seconds packs the small result files into /tmp/small.tgz (plain files of at most 400 kB, no folders)
while true; do
  cd /tmp/out && find . -type f \( -name '*.csv' -o -name '*.log' -o -name '*.out' -o -name '*.jsonl' -o -name '*.json' -o -name '*.txt' \) \
    -size -400k -not -path '*/jobs/*' -not -path '*checkpoints*' -print0 2>/dev/null | head -zn 2000 \
    | tar czf /tmp/small.new --null -T - 2>/dev/null; [ $(stat -c %s /tmp/small.new) -lt 12000000 ] && mv /tmp/small.new /tmp/small.tgz; sleep 20
done
