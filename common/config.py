"""The configuration of a run: one typed tree, read from TOML presets and ``--set section.key=value``.

Every field is documented where it is defined, and its bounds are checked when the file is read. Importing this module
imports neither torch nor numpy, so that every service can refuse a bad config within milliseconds of its start.

One file on purpose, though a long one: it has declarations alone, a class for each table of the TOML file in its order,
``Config`` at the end puts them together, and a key is looked up by its table. What is computed of them is in
``config_values``, what is checked across tables in ``config_checks``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Section(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of every config section: immutable, and an unknown key is an error."""


class RunConfig(Section):
    """What this run is called, how long it is and where it writes."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")] = "run"
    """Name of the run: its directory under ``directory`` and its shared memory under /dev/shm are named after it."""
    directory: str = "runs"
    """Folder that holds the directories of all runs."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 1
    """Seed of prompt order, sampling and the critic's head. The same seed on CPU gives the same run."""
    steps: Positive = 100
    """PPO iterations: generate, score, evaluate, update, publish."""


class LoRAConfig(Section):
    """Small matrices that are trained beside the policy's weights, which stay as they are (Hu et al. 2021)."""

    rank: NonNegative = 0
    """Rank of the adapters, one of those that engines take (1, 8, 16, 32, 64, 128, 256, 320, 512); 0: no LoRA, all
    weights are trained."""
    alpha: NonNegative = 0
    """The adapters' output is multiplied by alpha / rank, which must be a power of two: only then is it exact in every
    dtype. 0: like ``rank``."""
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Names of the projections that get adapters, in every layer."""


class ModelConfig(Section):
    """The policy that is trained; reference and critic backbone start from it."""

    path: str = "tiny"
    """An embedded model (``tiny``), one fetched by ``quartet get-model``, a Hugging Face directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the forward pass. bfloat16 keeps float32 master weights in the optimizer."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of trainer, critic and engine ``torch``; engine ``vllm`` has its own."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """LoRA, off by default."""
    trust_remote_code: bool = False
    """Whether Python code that lies in the model's directory, as some hub models bring it, is run. Every service then
    runs what the model's author wrote."""


class PromptFields(Section):
    """Names of the fields of a row; dots reach into nested fields. The defaults read verl's column layout too."""

    prompt: str = "prompt"
    """The prompt: a string, or a list of chat messages ``{"role", "content"}``."""
    ground_truth: str = "reward_model.ground_truth"
    """What the scorer compares with. ``ground_truth`` at the top level is read where this field is absent."""
    source: str = "data_source"
    """Where the row comes from; handed to the reward function as metadata."""
    metadata: str = "extra_info"
    """Anything else the reward function needs; handed over as it is."""


class ReasoningGymConfig(Section):
    """Prompts and their scorer from the package ``reasoning-gym``."""

    task: str = "chain_sum"
    """Name of the reasoning-gym dataset."""
    size: Positive = 4096
    """Number of training problems; as many again as ``eval.rows`` follow under another seed."""
    options: dict[str, int | float | str | bool | list[int]] = field(default_factory=dict)
    """Arguments of the dataset, for example ``{min_terms = 2, max_terms = 2, max_digits = 1}``."""


class PromptsConfig(Section):
    """Where prompts come from and how they become token IDs."""

    source: Literal["file", "reasoning_gym"] = "file"
    """``file`` reads JSONL or parquet; ``reasoning_gym`` generates problems."""
    train: list[str] = field(default_factory=list)
    """Training files, ``.jsonl`` or ``.parquet``. ``quartet:NAME`` names an embedded file."""
    fields: PromptFields = field(default_factory=PromptFields)
    """Names of the fields of a row."""
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    """Used by ``source = "reasoning_gym"``."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether string prompts go through the tokenizer's chat template; ``auto``: if it has one."""
    system: str = ""
    """System message put before every prompt that goes through a chat template; empty: none is added."""
    max_tokens: Positive = 64
    """Longest prompt in tokens. Longer rows are skipped, counted and named in the log."""
    missing_ground_truth: Literal["skip", "error", "allow"] = "skip"
    """A row without its ground truth is skipped and counted, ends the run, or is handed on as null."""
    shuffle: bool = True
    """Whether each pass over the rows has its own seeded order."""
    per_step: Positive = 64
    """Prompts per step."""


class VLLMConfig(Section):
    """Limits of engine ``vllm``; what is 0 follows from the run's other settings."""

    max_num_seqs: NonNegative = 0
    """Most samples that are decoded at a time; 0: ``rollout.rows``."""
    max_model_len: NonNegative = 0
    """Longest prompt and response together; 0: ``prompts.max_tokens + rollout.max_new_tokens``."""
    max_num_batched_tokens: NonNegative = 0
    """Tokens of one forward pass. On a GPU longer prefills are chunked; on CPU a whole sample must fit. 0: vLLM's own
    choice."""
    kv_cache_mib: NonNegative = 0
    """Memory of the KV cache. 0: what ``max_num_seqs`` samples of full length need, on a GPU at most
    ``gpu_memory_utilization`` of what is free when the engine starts."""
    gpu_memory_utilization: Share = 0.5
    """Share of the GPU's free memory that ``kv_cache_mib = 0`` may take; the optimizer states and activations of
    services on the same GPU come later and need the rest."""
    prefix_caching: bool = True
    """Whether the responses to one prompt share its KV cache."""
    graphs: bool = True
    """CUDA graphs and torch.compile. Off, the engine starts faster and decodes slower. Ignored on CPU: always off."""
    start_timeout: PositiveFloat = 300.0
    """Seconds until the engine must have started, compilation and graph capture included."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["torch", "vllm"] = "torch"
    """``torch``: any Hugging Face causal LM, the same samples for the same seed on CPU. ``vllm``: fast."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """Used by ``engine = "vllm"``."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine gives its KV cache back while the models are updated; ``auto``: where it shares a GPU with
    trainer or critic."""
    warn_difference: NonNegativeFloat = 0.0
    """Mean absolute difference between engine's and trainer's logprobs of a step, in nats, above which the run warns;
    0: by ``model.dtype``, 1e-3 (float32) or 0.05 (bfloat16)."""
    stop_difference: NonNegativeFloat = 0.0
    """Difference above which the run ends, since the engine does not sample what the trainer trains; 0: ten times the
    warning's."""
    replicas: Positive = 1
    """Rollout processes."""
    device: str = "auto"
    """``auto``: the GPU if there is one; else ``cpu``, ``cuda:N``, or a GPU's UUID (``nvidia-smi -L``), which every
    container and process understands alike."""
    threads: Positive = 1
    """CPU threads of one replica. Pinned, since the number of threads changes the last bits of a sum."""
    rows: Positive = 32
    """Rows of the decode batch. Sample s lives in row s modulo ``rows`` for all its life."""
    prefill_rows: Positive = 8
    """Rows of engine ``torch``'s prefill batch."""
    responses_per_prompt: Positive = 1
    """Responses sampled for each prompt (the group of GRPO and RLOO)."""
    max_new_tokens: Positive = 16
    """Longest response in tokens; a response cut there has finish reason ``length``."""
    temperature: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Sampling temperature. Trainer, reference and engine all divide the logits by it."""
    top_k: NonNegative = 0
    """Refused: a token that is cut off here has another probability in the trainer. See ``eval.top_k``."""
    top_p: Share = 1.0
    """Refused likewise. See ``eval.top_p``."""


class RewardFunctionConfig(Section):
    """One scorer and its weight in the sum."""

    function: str = "exact_match"
    """A built-in name, or ``path/to/file.py:function``."""
    weight: float = 1.0
    """Factor of this scorer in the weighted sum."""
    options: dict[str, int | float | str | bool] = field(default_factory=dict)
    """Keyword arguments passed to the function."""


class RewardConfig(Section):
    """Scoring of finished responses."""

    function: str = ""
    """Short form of ``functions`` with a single scorer of weight 1."""
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Scorers; the reward is their weighted sum, the accuracy is the first one's unweighted score."""
    replicas: NonNegative = 1
    """Reward processes started by ``quartet up``; more may come and go while running."""
    batch_size: Positive = 64
    """Most samples in one lease of a reward replica."""
    timeout_s: PositiveFloat = 10.0
    """Time limit of one batch. A scorer that takes longer is killed and its batch tried again."""
    attempts: Positive = 2
    """Tries before a sample that cannot be scored is masked out and counted."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; vectors are not decayed."""
    warmup_steps: NonNegative = 0
    """PPO steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up to the last step."""
    min_ratio: Fraction = 0.0
    """Learning rate at the last step, as a share of the peak."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global norm to which gradients are clipped; 0 switches clipping off."""


class LearnerConfig(Section):
    """What the policy update and the critic update have in common."""

    device: str = "auto"
    """``auto``: the GPU if there is one; else ``cpu``, ``cuda:N``, or a GPU's UUID (``nvidia-smi -L``), which every
    container and process understands alike."""
    threads: Positive = 1
    """CPU threads, pinned, since the number of threads changes the last bits of a sum."""
    epochs: Positive = 1
    """Passes over a step's samples."""
    mini_batch: NonNegative = 0
    """Samples per optimizer step; 0: all of them."""
    micro_batch: Positive = 32
    """Samples per forward and backward pass. Does not change the result."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW."""


class TrainerConfig(LearnerConfig):
    """The policy update."""


class CriticConfig(LearnerConfig):
    """The value model and its update."""

    warmup_steps: NonNegative = 0
    """First steps in which only the critic learns and the policy stays as it is."""
    value_clip: NonNegativeFloat = 0.2
    """Range around the old value within which the value loss is not clipped; 0 switches clipping off."""
    aggregation: Aggregation = "token-mean"
    """How the value losses of tokens become one number."""


class KLConfig(Section):
    """The penalty for leaving the reference policy."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """In every token's reward, in the policy loss, or nowhere (then no reference logprobs are computed)."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL divergence from samples (Schulman 2020, 'Approximating KL divergence')."""
    coefficient: NonNegativeFloat = 0.05
    """Factor of the penalty, or its first value under the adaptive controller."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive`` moves the coefficient towards ``target`` (Ziegler et al. 2019, section 2.2)."""
    target: PositiveFloat = 6.0
    """KL per response, in nats, that the adaptive controller aims at."""
    horizon: PositiveFloat = 10000.0
    """Samples over which the adaptive controller reacts."""


class PPOConfig(Section):
    """The objective."""

    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "gae"
    """Advantage estimator. All but ``gae`` need no critic: then none is started."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over the tokens of the global batch."""
    loss: Literal["ppo", "gspo"] = "ppo"
    """Token-level clipped ratio (Schulman et al. 2017), or GSPO's sequence-level ratio (Zheng et al. 2025)."""
    clip_low: NonNegativeFloat = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: NonNegativeFloat = 0.0
    """Bound on the loss of tokens with negative advantage, as a factor above 1 (Ye et al. 2020); 0 switches it off."""
    entropy: float = 0.0
    """Factor of the entropy bonus."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number."""
    kl: KLConfig = field(default_factory=KLConfig)
    """The KL penalty."""


class EvalConfig(Section):
    """Evaluation on problems that training never sees."""

    data: list[str] = field(default_factory=list)
    """Files with the held-out rows; empty with ``source = "file"``: no evaluation."""
    rows: NonNegative = 500
    """Rows evaluated; 0 switches evaluation off."""
    every: NonNegative = 0
    """Evaluate every so many steps; before the first and after the last step it is always done."""
    greedy: bool = True
    """Greedy decoding; otherwise sampling with ``rollout.temperature`` and the two cuts below."""
    top_k: NonNegative = 0
    """Sample from the so many most likely tokens alone; 0: from all."""
    top_p: Share = 1.0
    """Sample from the fewest tokens that have this much probability together; 1: from all."""


class CheckpointConfig(Section):
    """What a run is continued from, in ``runs/<name>/checkpoints/step-<n>/``: weights and optimizer states of trainer
    and critic, and where the coordinator was. After the last step the policy is saved as a Hugging Face directory,
    ``final``; ``quartet export`` makes one of any checkpoint."""

    snapshot_every: NonNegative = 0
    """Save a state every so many steps, in the background: what a trainer or critic that dies is restored from. Steps
    since then are repeated. 0: every step for models of at most 1 GiB, else every 10; a step is skipped while an
    earlier state is still being written, where any other number waits for it."""
    keep: Positive = 2
    """Newest states that are kept."""
    every: NonNegative = 0
    """Save and keep the states of every so many steps too; 0: only the newest and the best."""
    best: bool = True
    """Keep the state of the evaluation with the highest accuracy too, of those after which one was saved."""


class RestartConfig(Section):
    """Services that die and are started again, by ``quartet up`` or by docker."""

    limit: NonNegative = 5
    """Deaths of one replica without a finished step in between that are forgiven; 0: the run ends with the first."""


class WeightsConfig(Section):
    """How the policy's weights get from the trainer to the engines."""

    transport: Literal["auto", "alias", "copy"] = "auto"
    """``alias``: the engine runs on the trainer's own tensors, on the same device only. ``copy``: it copies them at
    each publish. ``auto``: alias where device, dtype and layout allow it, else copy."""
    bucket_mib: Positive = 512
    """``copy`` moves so much at a time, and checks in between that nobody writes."""


class BusConfig(Section):
    """The socket between the services."""

    listen: str = ""
    """Address for replicas that come over tcp, such as ``tcp://0.0.0.0:5555``; always encrypted. Empty: only this
    host's, by a socket in the run's directory."""
    keys: str = "keys"
    """Folder of the keys, made by ``quartet keys``; used with ``listen``."""
    group_access: bool = False
    """Whether other users of the coordinator's group may join as reward replicas: they may read the token cache and use
    the socket, and nothing else of the run. docker compose runs user code under a user of its own by this."""


class CacheConfig(Section):
    """The token cache in /dev/shm."""

    slots: NonNegative = 0
    """Samples that fit at one time; 0: twice a step's samples (room for slots in quarantine)."""
    prompts: NonNegative = 0
    """Prompts kept in the index; 0: eight steps' prompts plus the evaluation's rows, at least 1024."""


class TimeoutsConfig(Section):
    """Deadlines in seconds. Everything that waits has one."""

    start: PositiveFloat = 180.0
    """From the start until every service has said Hello and loaded its model; with engine ``vllm``,
    ``rollout.vllm.start_timeout`` more."""
    generate: PositiveFloat = 600.0
    """One lease of the rollout service."""
    evaluate: PositiveFloat = 300.0
    """One lease of values or logprobs."""
    update: PositiveFloat = 1200.0
    """One policy or critic update; and, again, a replica's taking over of the new weights."""
    checkpoint: PositiveFloat = 600.0
    """Saving the policy once."""
    progress: PositiveFloat = 1800.0
    """Longest time without any finished work; then the run says who waits for whom, and ends."""
    heartbeat: PositiveFloat = 1.0
    """Interval between heartbeats."""
    stop: PositiveFloat = 10.0
    """From Stop until a service is killed."""


class LogConfig(Section):
    """Logs and records."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    samples: NonNegative = 8
    """Samples of each step that are written to samples.jsonl; 0: all of them."""


class Config(Section):
    """The whole tree; one TOML table per section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    log: LogConfig = field(default_factory=LogConfig)
