"""Charts of Medha's figures, computed for the same deployments as the claims."""

from collections.abc import Sequence

from longhelix.figures.charts import Chart, Curve, Panel
from longhelix.figures.claims import Drawing
from longhelix.figures.pipelines import Bars, SpanRows, sequence_schedule, standard_schedule
from longhelix.figures.tied import SERVER, TiedDeployment, gpus_for, growth
from longhelix.perf.setting import Setting
from longhelix.spec.weights import num_parameters

M = 1e6
CHUNK = 4096
STAGES = (1, 2, 4, 8, 16)
CONTEXTS = (1, 2, 4, 10)
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_KVP = (1, 2, 4)


def charts(small: Setting, large: Setting) -> list[Drawing]:
    """Return charts of all figures that the paper's text describes in enough detail."""
    return [
        _figure_1(small),
        _figure_5(small),
        _figure_6(small),
        _figure_7(large),
        _figure_8(small),
        _figure_9(small),
        _figure_14(small),
        _figure_15(small, large),
        _figure_16(small, large),
        _figure_17(small),
        _figure_18(small),
        _figure_19(small),
        _figure_20(small, large),
        _figure_21(small, large),
        _figure_22(small),
    ]


def _figure_1(small: Setting) -> Chart:
    stages, groups = TiedDeployment(small, stages=16), TiedDeployment(small, stages=4, kvp=4)
    ttft = Curve.of("16 stages x TP 8", CONTEXTS, [stages.prefill_s(n * M, CHUNK) for n in CONTEXTS])
    tbt = Curve.of("4 stages x KVP 4 x TP 8", CONTEXTS, [1e3 * groups.decode_s(n * M) for n in CONTEXTS])
    return Chart("medha-figure-1", "Medha, Figure 1: 8B on 128 H100", (
        Panel("prefill", "context (M tokens)", "TTFT (s)", (ttft,), log="xy", every_x=True),
        Panel("decode", "context (M tokens)", "TBT (ms)", (tbt,), log="x", every_x=True, limit=("30 ms", 30.0)),
    ))  # fmt: skip


def _figure_5(small: Setting) -> Chart:
    lengths = (0.125, 0.25, 0.5, 1, 2, 4)
    system, model = small.system, small.model
    held = [n * 2**20 * small.kv_token_bytes + num_parameters(model) * small.weight_bytes
            for n in lengths]  # fmt: skip
    curves = (
        Curve.of("compute: TTFT 30 s", lengths, [gpus_for(small, n * 2**20, 30) for n in lengths]),
        Curve.of("bandwidth: TBT 20 ms", lengths, [size / system.memory.bytes_per_s / 0.02 for size in held]),
        Curve.of("capacity", lengths, [size / system.memory.size_bytes for size in held]),
        Curve.of("published", (1, 2), (20, 80), "kx"),
    )
    panel = Panel("", "context (Mi tokens)", "GPUs", curves, log="xy", limit=("8 GPUs", 8.0), every_x=True)
    return Chart("medha-figure-5", "Medha, Figure 5: H100s that 8B needs", (panel,))


def _figure_6(small: Setting) -> Chart:
    read_tb = [M * (M + chunk) / (2 * chunk) * small.kv_token_bytes / 1e12 for chunk in CHUNKS]
    (attention,) = small.model.attentions
    flops = 4 * attention.head_size * attention.heads.num_query_heads
    token_bytes = attention.heads.num_kv_heads * small.kv_head_bytes(attention)
    intensity = [chunk * flops / token_bytes for chunk in CHUNKS]
    ridge = small.system.rate(small.attends_in) / small.system.memory.bytes_per_s
    return Chart("medha-figure-6", "Medha, Figure 6: KV reads and arithmetic intensity by chunk size (8B, 1M)", (
        Panel("bytes", "chunk", "KV read (TB)", (Curve.of("all chunks", CHUNKS, read_tb),), log="xy", every_x=True),
        Panel("intensity", "chunk", "FLOP per byte", (Curve.of("attention", CHUNKS, intensity),), log="xy",
              limit=("H100's ridge", ridge), every_x=True),
    ))  # fmt: skip


def _figure_7(large: Setting) -> Chart:
    taken = [TiedDeployment(large).attention_s(M, chunk) for chunk in CHUNKS]
    curves = (
        Curve.of("model", CHUNKS, [seconds / taken[CHUNKS.index(2048)] for seconds in taken]),
        Curve.of("published", (32,), (1.11,), "kx"),
    )
    panel = Panel("", "chunk", "attention time, chunk 2048 = 1", curves, log="x", every_x=True)
    return Chart("medha-figure-7", "Medha, Figure 7: attention by chunk (70B, 8 H100, 1M)", (panel,))


def _figure_8(small: Setting) -> Chart:
    server = TiedDeployment(small)
    longest = [server.longest_s(M, chunk) for chunk in CHUNKS]
    adaptive = [server.adaptive(M, target_s) for target_s in longest]
    curves = (
        Curve.of("static", [1e3 * step_s for step_s in longest], [server.prefill_s(M, chunk) for chunk in CHUNKS]),
        Curve.of("adaptive", [1e3 * step_s for _, step_s in adaptive], [seconds for seconds, _ in adaptive]),
    )
    panel = Panel("", "longest step (ms)", "prefill (s)", curves, log="x")
    return Chart("medha-figure-8", "Medha, Figure 8: static and adaptive chunks (8B, 8 H100, 1M)", (panel,))


def _figure_9(small: Setting) -> Bars:
    server, num_chunks, stages = TiedDeployment(small), 8, 4
    chunk = 131072 / num_chunks
    chunks_s = [server.chunk_s(chunk, index * chunk) for index in range(num_chunks)]
    names = [f"stage {stage + 1}" for stage in range(stages)]
    return Bars("medha-figure-9", "Medha, Figure 9: 128K tokens in 8 chunks through 4 stages (8B, TP 8)", "s", (
        SpanRows("standard pipeline", list(zip(names, standard_schedule(chunks_s, stages), strict=True))),
        SpanRows("sequence pipeline (SPP)", list(zip(names, sequence_schedule(chunks_s, stages), strict=True))),
    ))  # fmt: skip


def _figure_14(small: Setting) -> Chart:
    deployments = [TiedDeployment(small, stages=stages) for stages in STAGES]
    gpus = [deployment.gpus for deployment in deployments]
    spp = [deployment.prefill_s(M, CHUNK) for deployment in deployments]
    striped, ring = ([d.striped_s(M, striped=balanced) for d in deployments] for balanced in (True, False))
    stage_s = [deployment.longest_s(M, CHUNK) / deployment.stages for deployment in deployments]
    return Chart("medha-figure-14", "Medha, Figure 14: SPP and striped attention (8B, 1M)", (
        Panel("TTFT", "GPUs", "TTFT (s)",
              (Curve.of("SPP", gpus, spp), Curve.of("striped attention", gpus, striped, "s--"),
               Curve.of("ring attention", gpus, ring, "^:")), log="xy", limit=("15 s", 15.0), every_x=True),
        Panel("head-of-line blocking", "GPUs", "longest wait (s)",
              (Curve.of("SPP: a stage's last chunk of 4096", gpus, stage_s),
               Curve.of("striped attention: the whole prefill", gpus, striped, "s--")), log="xy", every_x=True),
    ))  # fmt: skip


def _figure_15(small: Setting, large: Setting) -> Chart:
    def panel(title: str, setting: Setting) -> Panel:
        curves = []
        for n in CONTEXTS:
            fitting = [d for d in (TiedDeployment(setting, stages=stages) for stages in STAGES) if d.fits(n * M, CHUNK)]
            seconds = [deployment.prefill_s(n * M, CHUNK) for deployment in fitting]
            curves.append(Curve.of(f"{n}M", [deployment.gpus for deployment in fitting], seconds))
        return Panel(title, "GPUs", "TTFT (s)", curves, log="xy", limit=("30 s", 30.0), every_x=True)

    return Chart("medha-figure-15", "Medha, Figure 15: SPP by number of stages of TP 8, contexts that fit", (
        panel("8B", small), panel("70B", large)
    ))  # fmt: skip


def _figure_16(small: Setting, large: Setting) -> Chart:
    def panel(title: str, setting: Setting) -> Panel:
        curves = []
        for n in CONTEXTS:
            fitting = [d for d in (TiedDeployment(setting, stages=stages) for stages in STAGES) if d.fits(n * M)]
            milliseconds = [1e3 * deployment.decode_s(n * M) for deployment in fitting]
            curves.append(Curve.of(f"{n}M", [deployment.stages for deployment in fitting], milliseconds))
        return Panel(title, "stages of TP 8", "TBT (ms)", curves, log="xy", every_x=True)

    return Chart(
        "medha-figure-16", "Medha, Figure 16: decode by number of stages", (panel("8B", small), panel("70B", large))
    )


def _figure_17(small: Setting) -> Chart:
    curves = [
        Curve.of(f"{n}M", _KVP, [1e3 * TiedDeployment(small, 4, kvp).decode_s(n * M) for kvp in _KVP]) for n in CONTEXTS
    ]
    panel = Panel("", "KVP", "TBT (ms)", curves, limit=("30 ms", 30.0), every_x=True)
    return Chart("medha-figure-17", "Medha, Figure 17: KVP on decode (8B, 4 stages of TP 8)", (panel,))


def _figure_18(small: Setting) -> Chart:
    chunks = CHUNKS[:4]
    curves = []
    for kvp in _KVP:
        found = TiedDeployment(small, stages=4, kvp=kvp, tp=4)
        tbt = [1e3 * found.p95_s(M, chunk) for chunk in chunks]
        curves.append(Curve.of(f"KVP {kvp}", tbt, [found.prefill_s(M, chunk) for chunk in chunks]))
    panel = Panel("chunks of 32 to 256, left to right", "P95 TBT (ms)", "TTFT (s)", curves, log="xy")
    return Chart("medha-figure-18", "Medha, Figure 18: TTFT against TBT (8B, 1M, TP 4, 4 stages)", (panel,))


def _figure_19(small: Setting) -> Chart:
    grown = growth(small, 2 * M, 512, stages=4, most_kvp=4)
    progress = grown.prefixes / M
    return Chart("medha-figure-19", "Medha, Figure 19: KVP groups join as the context grows (8B, 2M, chunk 512)", (
        Panel("GPUs", "tokens processed (M)", "GPUs",
              (Curve.of("4 stages of TP 8 in each group", progress, grown.kvp * 4 * SERVER, "-"),)),
        Panel("iteration", "tokens processed (M)", "iteration (ms)",
              (Curve.of("growing", progress, 1e3 * grown.steps_s, "-"),
               Curve.of("one group", progress, 1e3 * grown.alone_s, "--"))),
    ))  # fmt: skip


def _figure_20(small: Setting, large: Setting) -> Chart:
    def panel(title: str, setting: Setting) -> Panel:
        curves = []
        for causal, style in ((False, "o-"), (True, "o--")):
            for stages in (4, 16):
                deployment = TiedDeployment(setting, stages)
                values = [100 * deployment.mfu(n * M, CHUNK, causal=causal) for n in CONTEXTS]
                label = f"{stages} stages, " + ("causal" if causal else "no mask")
                curves.append(Curve.of(label, CONTEXTS, values, style))
        return Panel(title, "context (M tokens)", "MFU (%)", curves, log="x", every_x=True)

    return Chart("medha-figure-20", "Medha, Figure 20: MFU of prefill, with and without the causal mask", (
        panel("8B", small), panel("70B", large)
    ))  # fmt: skip


def _figure_21(small: Setting, large: Setting) -> Chart:
    def panel(title: str, setting: Setting) -> Panel:
        curves = []
        for kvp in _KVP:
            deployment = TiedDeployment(setting, kvp=kvp)
            fitting = [n for n in CONTEXTS if deployment.fits(n * M)]
            curves.append(Curve.of(f"KVP {kvp}", fitting, [100 * deployment.mbu(n * M) for n in fitting]))
        return Panel(title, "context (M tokens)", "MBU (%)", curves, log="x", every_x=True, limit=("92%", 92.0))

    return Chart("medha-figure-21", "Medha, Figure 21: bandwidth utilisation of decode (TP 8), contexts that fit", (
        panel("8B", small), panel("70B", large)
    ))  # fmt: skip


def _figure_22(small: Setting) -> Chart:
    server, counts = TiedDeployment(small), (0, 16, 32, 64, 128)
    panel = Panel("", "co-batched decodes", "P95 of a step (ms)", _batched(server, counts), log="y", every_x=True)
    return Chart("medha-figure-22", "Medha, Figure 22: one prefill of 1M with decodes of 1K (8B, 8 H100)", (panel,))


def _batched(server: TiedDeployment, counts: Sequence[int]) -> list[Curve]:
    return [
        Curve.of(f"chunk {chunk}", counts, [1e3 * server.p95_s(M, chunk, count) for count in counts])
        for chunk in (32, 128, 512, 2048)
    ]
