"""The descriptions of all commands, which `sympow COMMAND --help` prints."""

TRAIN = """Trains the model of a recipe, or continues from the newest checkpoint in the run's folder. A recipe is a
Python function that returns a RunConfig; key=value sets a field of the RunConfig. Ctrl-C saves a checkpoint and ends
the run after the current step; the same command continues the run."""

EVALUATE = """Measures the mean loss at each position of the context, over sequences from the held-out documents.
Positions are put into bins whose widths double. The result shows how much a model gains from context, also from longer
contexts than it was trained on."""

RUN = "Use the model in this run's folder, or in this checkpoint."

SCORED = "Use the model in this run's folder, checkpoint, or folder of Hugging Face transformers."

TRUST_CODE = "Import mixers that a config names by import path, which runs their code (default: refuse)."

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = "Compute with weights in this dtype; auto is the dtype of the checkpoint (default: auto)."
DEVICE = "Compute on this device: auto, cpu, cuda, ...; auto is a GPU if there is one (default: auto)."

AR_HITS = """Measures mean loss and perplexity on held-out text. Tokens are split by whether the bigram that ends in
the token occurred earlier in the same sequence, and by how often the bigram occurs in the training data. An AR hit is
a repeated bigram that is rare in training: only recall from the context predicts it. For several runs the command also
prints how much each part contributes to the gap to the first run, with bootstrap intervals."""

RECALL_PROBE = """Asks a model for the values of keys. A sequence consists of random tokens of the model's own
vocabulary: first pairs of a key and a value, then every key and its value once more between filler tokens. Prints loss
and accuracy on the second occurrences of values and on filler."""

PASSKEY = """Measures how often a model names a number of five digits that a long text contains. The text's length
varies, and so does the number's depth in it: at the beginning, a quarter, half, three quarters and the end. Runs of
sympow and models of Hugging Face transformers are measured in the same way."""

GENERATE = """Reads a prompt in chunks and continues it token by token from the model's state. The text goes to
standard output, the state's size and the speed go to standard error. With --context the prompt follows the text that
`sympow read` has read. With --speculate or --draft the model reads several proposed tokens in one step, as long as
this saves time. It rejects proposed tokens that it would not have drawn itself, so the text is the same."""

READ = """Reads a text in chunks and writes the state of every layer into a context file. `sympow generate --context`
can continue from this file any number of times. Memory does not grow with the text, except for key/value caches of the
model. Every half minute, and after Ctrl-C, the state so far is saved in FILE.part. The same command then continues
from FILE.part, and removes it at the end."""

SERVE = """Serves a model to clients of OpenAI's interface: completions, chats (with a chat template in the folder) and
streams. Requests are answered in batches; a request's answer does not depend on the others. A prefix that a prompt
shares with an earlier prompt is not read again. SIGINT or SIGTERM lets running requests end and stops the server. The
command needs the extra `serve`; docs/serving.md has examples."""

EXPORT = """Writes the model of a run, with its tokenizer, as a folder that from_pretrained of Hugging Face
transformers reads after `import sympow.integrations.transformers`."""

CONVERT = """Reads a pretrained model, such as Llama or Qwen, and replaces the softmax attention of its layers by power
attention or by window attention; docs/conversion.md lists the models. A pattern of power, window and softmax gives the
kind of each layer; softmax keeps the layer as it is. All other weights are kept. The result is a run's folder with the
model's tokenizer, for `sympow distill`, generate, read, evaluate and export."""

DISTILL = """Trains a converted model in three stages. The first stage trains every layer's attention on that of the
teacher, the second the predictions on those of the teacher, the third the model on text. key=value sets a field of the
run's config, such as a field of its data. Ctrl-C saves a checkpoint; the same command continues the run. The metrics
contain the held-out loss, the teacher's held-out loss and the gap between them. To use several GPUs, run torchrun -m
sympow.cli distill ..."""

SIZES = """Prints state dimensions, state sizes and weight-state FLOP ratios of power, linear, softmax and window
attention for a model shape. The shape is a preset in a body; options change single sizes of it."""

MQAR = """Trains models on multi-query associative recall and reports how many queries they answer. A recipe is a
Python function that returns a RecallConfig, or a Sweep of them. Results go to results.csv in the sweep's folder; the
same command continues a sweep that was stopped, and repeats no run that has finished."""

MQAR_FIGURES = """Draws accuracy against width, pairs, heads, state size and learning rate, and the number of pairs
against the state size. Figures for which the results have no data are left out."""

ROW_TOKENS = (
    "Cut documents into rows of N tokens. Small directories are joined until a document fills a row (default: 65,536)."
)

CORPUS = """Makes a corpus of texts of your own in the layout of LongCrawl64. A document is a file, a folder, or a row
of a JSON lines, Parquet or Arrow file. Files may be compressed (.gz, .zst). Documents are cut into rows, and 5% of them
are held out. The same command continues interrupted work, and does not change a finished corpus."""

KERNEL_CORPUS = """Makes a corpus of the Linux kernel's source in the layout of LongCrawl64. A document is a directory,
cut into rows; whole subtrees are held out. The source is Debian's package linux-source-6.1, which
apt-get fetches, or the path of --source. The same command continues interrupted work, and does not change a finished
corpus."""

DOC_CORPUS = """Makes a corpus of English manuals in the layout of LongCrawl64. A document is a directory of a manual,
cut into rows; whole packages are held out. The source is documentation packages of Debian, which
apt-get fetches, or the folder of --source. The same command continues interrupted work, and does not change a finished
corpus."""

DEMO = """Trains a small model with power attention and the same model with softmax attention on the source of Python's
standard library, evaluates both at four times the context they were trained on, draws the curves, and generates a
text. Steps that are finished already are not repeated."""
