rule plot_live:
    """A figure of this run's own records."""
    input:
        f"{RESULTS}/evidence/{{study}}.bag",
    output:
        multiext(f"{RESULTS}/figures/{{study}}", ".csv", ".svg", ".png", ".json"),
    log:
        f"{RESULTS}/logs/plot_live_{{study}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        folder=subpath(output[0], parent=True),
        source=source_digest("figures"),
    message:
        "Draw {wildcards.study} from this run"
    shell:
        "loraforge figure {wildcards.study} --bag $(cat {input}) --out {params.folder} 2>&1 | tee {log}"


rule plot_committed:
    """The same figure from the committed evidence of a larger machine, or of the full study."""
    input:
        lambda wildcards: f"{EVIDENCE[wildcards.study, wildcards.host]}/tagmanifest-sha256.txt",
    output:
        multiext(
            f"{RESULTS}/figures/{{host}}/{{study}}", ".csv", ".svg", ".png", ".json"
        ),
    log:
        f"{RESULTS}/logs/plot_committed_{{host}}_{{study}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        bag=lambda wildcards: EVIDENCE[wildcards.study, wildcards.host],
        folder=subpath(output[0], parent=True),
        source=source_digest("figures"),
    message:
        "Draw {wildcards.study} from the committed evidence of {wildcards.host}"
    shell:
        "loraforge figure {wildcards.study} --bag {params.bag} --out {params.folder} 2>&1 | tee {log}"


rule document_figures:
    """The figures that the README shows, from the committed evidence; no target's input."""
    input:
        expand("docs/figures/{study}.svg", study=["quality", "recompression"]),


rule plot_documented:
    """A figure of the README."""
    input:
        lambda wildcards: f"{EVIDENCE[wildcards.study, 'h200']}/tagmanifest-sha256.txt",
    output:
        multiext("docs/figures/{study}", ".csv", ".svg", ".png", ".json"),
    log:
        f"{RESULTS}/logs/plot_documented_{{study}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        bag=subpath(input[0], parent=True),
        folder=subpath(output[0], parent=True),
    message:
        "Draw {wildcards.study} for the README"
    shell:
        "loraforge figure {wildcards.study} --bag {params.bag} --out {params.folder} 2>&1 | tee {log}"


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


rule compressed_fleet:
    """The compressed fleet of the configuration's export section."""
    input:
        f"{RESULTS}/fleet/{CONFIG.export.policy}_{file_name(CONFIG.export.budget)}/manifest.json",
