"""On a CPU: does every job give rows whose keys are those of one committed row? check.py, in the root of a checkout."""
import re, shlex, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(__file__).parent))
import mqar_ids
from benchmarks.common.measure import read
from benchmarks.repeat import RESULTS, key_of, rule_of
from benchmarks.context_scaling.grid import SCALES
from sympow.models import LanguageModel, RecallModel
from sympow.recall.run import _described

def found(name, new, say=()):
    old = read(RESULTS / name); rule = rule_of(name)
    key = key_of(rule, new, old[0])
    same = [row for row in old if key_of(rule, row, row) == key]
    missing = [k for k in rule.keys.split() if k in old[0] and k not in new]
    extra = [(k, same[0].get(k), new.get(k)) for k in ('parameters', 'validations', 'stop_at', 'data_seed', 'weight_decay', 'precision') if same and k in new and k in same[0] and same[0][k] != new[k]]
    print('OK ' if len(same) == 1 and not extra else 'BAD', len(same), name, {k: v for k, v in key.items() if k in ('variant','recipe','label','seed','learning_rate','test','context','tokens','run','T','steps','chunk','mode','what','model','corpus')}, missing, extra, [same[0].get(v) for v in rule.values] if same else '')

for line in (Path(__file__).parent / 'jobs.txt').read_text().splitlines():
    if line.startswith('#'):
        name = line[2:].split(' | ')[0]; continue
    words = shlex.split(line.replace('$O', '/tmp/o').replace('$CORPUS', '/tmp/corpus').replace('$REPEAT', '/r'))
    if 'mqar_ids.py' in line:
        ids = [w for w in words[4:] if not w.startswith('--')]
        sweep = mqar_ids.chosen(words[2], ids)
        for run in sweep.runs:
            longest = max(task.length for task in (*run.train, *run.test))
            model = RecallModel(run.model, positions=longest if run.architecture.positions else 0, seed=0)
            for task in run.tests:
                found(name, _described(run, task, model))
    elif 'benchmarks.learning' in line:
        import benchmarks.learning as L
        run = L._named(words[words.index('--names') + 1])
        config = run.config(SCALES['full'], Path('/tmp/corpus'), 'cpu', True)
        with torch.device('meta'):
            size = LanguageModel(config.model, seed=0).num_parameters()
        found(name, {n: getattr(run, n) for n in L.KEY} | {'scale': 'full', 'corpus': '1600 rows, 44d47a9151c6', 'compiled': True, 'parameters': size})
    elif 'benchmarks.ar_hits' in line:
        import benchmarks.ar_hits.__main__ as A
        options = A._parser().parse_args(words[3:])
        job = A.Job(options.recipes, 0, float(options.rates))
        config = job.config(False, options.corpus, 'cpu', options.vocab_size, options.changes)
        with torch.device('meta'):
            size = LanguageModel(config.model, seed=0).num_parameters()
        found(name, {**job._asdict(), 'optimizer': config.training.optimizer, 'changes': ' '.join(options.changes), 'steps': config.training.steps, 'parameters': size})
    elif 'ranks.py' in line:
        import benchmarks.training_ranks as R
        import argparse, json
        words = words[2:]
        steps = int(words[words.index('--steps') + 1]) if '--steps' in words else 100
        parser = R.options('x', R.__doc__, rows=8, steps=100, learning_rate=3e-4); parser.add_argument('--text', action='store_true'); parser.add_argument('--warmup', type=int)
        args = parser.parse_args(words); args.warmup = args.steps // 10 if args.warmup is None else args.warmup
        config = R.run_config(args); old = read(RESULTS / name)[1]
        differ = {k: (v, config.training.to_dict().get(k)) for k, v in old['training'].items() if config.training.to_dict().get(k) != v}
        differ |= {k: (v, config.model.to_dict().get(k)) for k, v in old['model'].items() if config.model.to_dict().get(k) != v}
        found(name, {'run': 'halves', 'against': 'one', 'first_step': 1, 'steps': args.steps}); print('   config differs:', differ, old['text'] == args.text)
