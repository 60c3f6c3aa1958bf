rule plot_live:
    """A figure of this run's own records."""
    input:
        lambda wildcards: bag_file(STUDY_OF[wildcards.place + wildcards.figure]),
    output:
        multiext(
            f"{RESULTS}/figures/{{place}}{{figure}}", ".csv", ".svg", ".png", ".json"
        ),
    log:
        f"{RESULTS}/logs/plot_live_{{place}}{{figure}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        folder=subpath(output[0], parent=True),
        source=source_digest("figures"),
    message:
        "Draw {wildcards.figure} from this run"
    shell:
        "loraforge figure {wildcards.figure} --bag $(cat {input}) --out {params.folder} 2>&1 | tee {log}"


rule plot_committed:
    """The same figure from the committed evidence of a larger machine, or of the full study."""
    input:
        lambda wildcards: f"{EVIDENCE[TARGET_OF[wildcards.figure], wildcards.host]}/tagmanifest-sha256.txt",
    output:
        multiext(
            f"{RESULTS}/figures/{{host}}/{{figure}}", ".csv", ".svg", ".png", ".json"
        ),
    log:
        f"{RESULTS}/logs/plot_committed_{{host}}_{{figure}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        bag=lambda wildcards: EVIDENCE[TARGET_OF[wildcards.figure], wildcards.host],
        folder=subpath(output[0], parent=True),
        source=source_digest("figures"),
    message:
        "Draw {wildcards.figure} from the committed evidence of {wildcards.host}"
    shell:
        "loraforge figure {wildcards.figure} --bag {params.bag} --out {params.folder} 2>&1 | tee {log}"


# figures that the README and docs/ show; those of serving kernels once there is evidence of them
DOCUMENTED = ["quality", "recompression"]
DOCUMENTED += [
    figure
    for figure in (
        "retention",
        "regressions",
        "dispatch_layers",
        "dispatch",
        "scale",
        "cpu_serving",
        "mixed_serving_vllm",
        "mixed_serving_sglang",
        "six_cell",
        "residency",
    )
    if (TARGET_OF[figure], documented_on(figure)) in EVIDENCE
]


rule document_figures:
    """The figures that the README shows, from the committed evidence; no target's input."""
    input:
        expand("docs/figures/{figure}.svg", figure=DOCUMENTED),


rule plot_documented:
    """A figure of the README."""
    input:
        lambda wildcards: f"{EVIDENCE[TARGET_OF[wildcards.figure], documented_on(wildcards.figure)]}/tagmanifest-sha256.txt",
    output:
        multiext("docs/figures/{figure}", ".csv", ".svg", ".png", ".json"),
    log:
        f"{RESULTS}/logs/plot_documented_{{figure}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        bag=subpath(input[0], parent=True),
        folder=subpath(output[0], parent=True),
    message:
        "Draw {wildcards.figure} for the README"
    shell:
        "loraforge figure {wildcards.figure} --bag {params.bag} --out {params.folder} 2>&1 | tee {log}"


rule spectra:
    """Fraction of the nominal rank that 90 % of the energy needs (Fig. 1)."""
    input:
        figure_files("spectra"),


rule allocation:
    """Ranks and budget shares by adapter and module, and their concentration."""
    input:
        figure_files("allocation"),


rule recompression:
    """Seconds to factorise the fleet, by method (Fig. 5)."""
    input:
        figure_files("recompression"),


rule quality:
    """Native scores under every policy and budget (Tables 1, 2 and 8)."""
    input:
        figure_files("quality"),


rule quality_study:
    """Policies chosen on validation splits and reported on test splits, with all baselines (Tables 1, 2 and 8)."""
    input:
        [figure_files(study) for study in QUALITY_STUDY],


rule ablation_shrink:
    """Shrinks against the engines' over phase, model and pool (Fig. 9); on a GPU they are timed again."""
    input:
        figure_files("shrink_ablation"),


rule ablation_expand:
    """RowExpand's tile limit, staging and resources, and expands against the engines' (Figs. 10, 17, Table 5)."""
    input:
        figure_files("expand_ablation"),


rule dispatch:
    """Forced, native and automatic kernels over rank, tokens and phase, and whole layers (Figs. 11, 13-15)."""
    input:
        figure_files("dispatch"),


rule cpu_ops:
    """Serving operations on a CPU against its engine's; timed here where cpu_ops.engine names one."""
    input:
        figure_files("cpu_ops"),


rule scale:
    """Time and memory of planning over adapters; measured here where scale.adapters names sizes of fleets."""
    input:
        figure_files("scale"),


rule mixed_serving_vllm:
    """Both fleets on one device in vLLM, four arms over offered rates (Fig. 12); on a GPU with vLLM it is run again."""
    input:
        lambda wildcards: serving_figures("mixed_serving_vllm"),


rule six_cell:
    """Weights by execution, throughput, latencies and memory (Fig. 7, Table 3); run where mixed_serving_vllm is."""
    input:
        lambda wildcards: serving_figures("six_cell"),


rule fixed_work:
    """The deployed arms with equal output counts, and their paging (Fig. 16, Table 4); run where the others are."""
    input:
        lambda wildcards: serving_figures("fixed_work"),


rule residency:
    """Weights by execution by room for some or all adapters (Fig. 8); run where the others are."""
    input:
        lambda wildcards: serving_figures("residency"),


rule mixed_serving_sglang:
    """Both fleets on one device in SGLang, four arms over offered rates (Fig. 6, Table 7); on a GPU with it run again."""
    input:
        lambda wildcards: serving_figures("mixed_serving_sglang"),


rule six_cell_sglang:
    """Weights by execution in SGLang (Fig. 7, Table 3); run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("six_cell_sglang"),


rule fixed_work_sglang:
    """The deployed arms with equal output counts in SGLang (Fig. 16, Table 4); run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("fixed_work_sglang"),


rule residency_sglang:
    """Room for some or all adapters in SGLang (Fig. 8); run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("residency_sglang"),


rule stopping_contract_sglang:
    """Ways to end answers, and what SGLang's scheduler admits (Table 6); run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("stopping_contract_sglang"),


rule single_fleet_sglang:
    """Each fleet alone in SGLang over offered rates (Fig. 19, Table 9); run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("single_fleet_sglang"),


rule adapters_500_sglang:
    """Five hundred adapters resident in SGLang against fifty; run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("adapters_500_sglang"),


rule natural_serving:
    """Real adapters, prompts and answers in vLLM on a GPU, four arms over offered rates; run where the others are."""
    input:
        lambda wildcards: serving_figures("natural_serving"),


rule natural_serving_sglang:
    """The same in SGLang; run where mixed_serving_sglang is."""
    input:
        lambda wildcards: serving_figures("natural_serving_sglang"),


rule cpu_serving:
    """Real adapters and prompts on a real server, on processors; its environment is made here where there are wheels."""
    input:
        lambda wildcards: serving_figures("cpu_serving"),


rule compressed_fleet:
    """The compressed fleet of the configuration's export section."""
    input:
        f"{RESULTS}/fleet/{CONFIG.export.policy}_{file_name(CONFIG.export.budget)}/manifest.json",
