"""What the help of each command says about it."""

TRAIN = """Trains the model of a recipe, or continues where its folder's newest checkpoint stands. A recipe is a Python
function that returns a RunConfig; each field of that can be set by key=value. Ctrl-C saves a checkpoint and ends the
run after the current step; the same command continues it."""

EVALUATE = """Mean loss at each position of the context, over rows from the held-out documents, in bins that grow
exponentially: how much a model gains from context, also beyond what it was trained on."""

SCORED = "a run's folder, a checkpoint, or a folder of Hugging Face transformers"

AR_HITS = """Mean loss and perplexity on held-out text, split by whether the bigram that ends in a token stood earlier
in its row, and by how often training holds that bigram. An AR hit is a repeat that is rare in training: only recall
from the context predicts it. Of several runs, how much of the gap to the first each part explains, with bootstrap
intervals."""

RECALL_PROBE = """Asks for values behind keys in passages of random tokens of the model's own vocabulary: pairs of a key
and a value, then every key once more among filler. Prints loss and accuracy on the values asked for and on filler."""

PASSKEY = """How often a model names a number of five digits that stands in a long text, by the text's length and the
number's depth in it: at the beginning, a quarter, half, three quarters and the end. Runs of sympow and models of
Hugging Face transformers are measured alike."""

GENERATE = """Reads a prompt in chunks and continues it token by token from the carried state; the text goes to standard
output, the state's size and the speed to standard error. With --context the prompt follows what `sympow read`
has read. With --speculate or --draft the model reads several draft tokens in one step, as long as this saves time. It
takes back those that it would not have drawn itself, so the text is the same."""

READ = """Reads a text in chunks, in memory that does not grow with it but for caches of the model, and writes
the state of every layer into a context file, from which `sympow generate --context` continues as often as one
likes. What was read is kept every half minute in FILE.part, also after Ctrl-C: the same command goes on from
there, and removes it at the end."""

SERVE = """Serves a model to clients of OpenAI's interface: completions, chats (with a chat template in the folder) and
streams. Requests are answered together, each as if it were alone, and prompts that begin as earlier ones did are not
read again. SIGINT or SIGTERM ends it in order. It needs the extra `serve`; docs/serving.md has examples."""

EXPORT = """Writes the model of a run, with its tokenizer, as a folder that from_pretrained of Hugging Face transformers
reads after `import sympow.integrations.transformers`."""

CONVERT = """Reads Llama, SmolLM, Qwen2 or Qwen3 and exchanges the softmax attention of its layers for power attention
or for windows. A pattern of power, window and softmax says which layers; softmax stays as it is. All other weights
stay. The result is a run's folder with the model's tokenizer, for `sympow distill`, generate, read, evaluate and
export."""

DISTILL = """Trains a converted model in three stages: first every layer's attention on that of the teacher, then the
predictions on those of the teacher, at last the model on text. Each field of the run, such as those of its data, is set
by key=value. Ctrl-C saves a checkpoint; the same command continues. The metrics hold the held-out loss, that of the
teacher and the gap between them. On several GPUs: torchrun -m sympow.cli distill ..."""

SIZES = """State dimensions, state sizes and weight-state FLOP ratios of power, linear, softmax and window attention,
for a model shape: a preset, in a body, with single sizes changed."""

MQAR = """Trains models on multi-query associative recall and reports how many queries they answer. A recipe is a Python
function that returns a RecallConfig, or a Sweep of them. Results go to results.csv in the sweep's folder; the same
command continues a sweep that was stopped, and repeats no run that has finished."""

MQAR_FIGURES = """Draws accuracy against width, pairs, heads and state, the learning rates, and the capacity of states,
as far as the results have data for them."""

KERNEL_CORPUS = """Makes a corpus of the Linux kernel's source in the layout of LongCrawl64: a directory a document, cut
to rows of 65,536 tokens, whole subtrees held out. The source is Debian's package linux-source-6.1, fetched by apt-get,
or --source. The same command continues what was stopped, and leaves a finished corpus as it is."""

DOC_CORPUS = """Makes a corpus of English manuals in the layout of LongCrawl64: a directory of a manual a document, cut
to rows of 65,536 tokens, whole packages held out. The source is documentation packages of Debian, fetched by apt-get,
or --source. The same command continues what was stopped, and leaves a finished corpus as it is."""

DEMO = """Trains a small model with power attention and the same model with softmax attention on the source of Python's
standard library, evaluates both at four times the context they were trained on, draws the curves, and generates. What
is done already is not done again."""
