RECORDS = {
    "spectra": [f"{RESULTS}/factors.jsonl"],
    "allocation": [
        f"{RESULTS}/allocation/{policy}_{budget}.jsonl"
        for policy, budget in ALLOCATIONS
    ],
    "recompression": [f"{RESULTS}/recompression.jsonl"],
    "quality": [f"{RESULTS}/quality.jsonl"],
    "quality_selection": [
        f"{RESULTS}/study/validation.jsonl",
        f"{RESULTS}/study/selected.json",
    ],
    "quality_study": [f"{RESULTS}/study/test.jsonl", f"{RESULTS}/study/selected.json"],
    "cpu_ops": [f"{RESULTS}/cpu_ops.jsonl"],
    "scale": [f"{RESULTS}/scale.jsonl"],
    **{study: [f"{RESULTS}/kernels/{study}.jsonl"] for study in KERNEL_STUDIES},
    **{
        study: [f"{RESULTS}/serving/{part}.jsonl" for part in parts_of(study)]
        for study in SERVING
    },
}

# descriptions of interpreters that records come from, where that is another one than the workflow's
MACHINES = {study: machine_files(parts_of(study)[0]) for study in SERVING}

# sections of the configuration, besides name and fleet, that the records of a study depend on
DEPENDS = {
    "spectra": ["factor"],
    "allocation": ["factor", "policies", "budgets"],
    "recompression": ["recompression"],
    "quality": ["factor", "quality"],
    **{study: ["factor", "quality", "study"] for study in QUALITY_STUDY},
    "cpu_ops": ["cpu_ops"],
    "scale": ["scale"],
    **{study: ["kernels"] for study in KERNEL_STUDIES},
    **{study: ["gpu_serving"] for study in GPU_SERVING},
    "cpu_serving": ["cpu_serving"],
}

# what is not here runs on a CPU
PROTOCOLS = dict.fromkeys(KERNEL_STUDIES, "paper")
PROTOCOLS |= dict.fromkeys(["quality", *QUALITY_STUDY], "reduced") if ON_GPU else {}


rule bag_evidence:
    """The records of a study as a BagIt bag with all that explains them; the output holds the bag's path."""
    input:
        records=lambda wildcards: RECORDS[wildcards.study],
        machine=lambda wildcards: MACHINES.get(wildcards.study, []),
    output:
        f"{RESULTS}/evidence/{{study}}.bag",
    log:
        f"{RESULTS}/logs/bag_evidence_{{study}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        lock=LOCK,
        config=lambda wildcards: section("name", "fleet", *DEPENDS[wildcards.study]),
        target=lambda wildcards: target_of(wildcards.study),
        engine=lambda wildcards: (
            f"--engine {ENGINE_OF[wildcards.study]}"
            if wildcards.study in ENGINES
            else ""
        ),
        protocol=lambda wildcards: protocol(wildcards.study),
        root=subpath(output[0], parent=True),
        records=lambda wildcards, input: [f"--records {file}" for file in input.records],
        machine=lambda wildcards, input: [
            f"--machine {Path(file).parent}" for file in input.machine[:1]
        ],
        source=source_digest(
            "evidence",
            "figures",
            "quality/scores.py",
            "quality/selection.py",
            "quality/statistics.py",
        ),
    message:
        "Bag the evidence: {wildcards.study}"
    shell:
        "loraforge evidence bag {params.target} {params.engine} {params.records} --config <(printf %s {params.config:q}) --fleet {params.lock}"
        " --protocol {params.protocol} {params.machine} --out {params.root} --force > {output} 2> >(tee {log} >&2)"


rule promote_evidence:
    """Copy this run's bags into the committed evidence: the only rule that writes there, and no target's input."""
    input:
        [bag_file(study) for study in LIVE],
        # neither a long study, a GPU, a server nor a thousand adapters are put to work only to promote
        [
            bag_file(study)
            for study in [*QUALITY_STUDY, "scale", *KERNEL_STUDIES, *SERVING]
            if Path(bag_file(study)).exists()
        ],
    log:
        f"{RESULTS}/logs/promote_evidence.log",
    conda:
        "../../envs/core.yaml"
    message:
        "Promote the bags to the committed evidence"
    shell:
        "for bag in {input}; do loraforge evidence promote $(cat $bag) --to evidence; done 2>&1 | tee {log}"


rule audit:
    """Re-hash all evidence, recompute every summary and every figure's numbers; fails naming file and claim."""
    input:
        lock=LOCK,
        index=INDEX,
    log:
        f"{RESULTS}/logs/audit.log",
    conda:
        "../../envs/core.yaml"
    params:
        figures=lambda wildcards: [f"--figures {folder}" for folder in drawn_figures()],
        bags=lambda wildcards: live_bags(),
    message:
        "Audit evidence and figures"
    shell:
        "(loraforge audit evidence --fleet {input.lock} {params.figures}"
        " && for bag in {params.bags}; do loraforge audit $bag; done) 2>&1 | tee {log}"
