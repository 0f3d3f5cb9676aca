//! Writes the script of a Slurm array.

use std::path::Path;

/// Parameters of the script.
#[derive(Clone, Debug)]
pub struct Slurm<'a> {
    /// Command of the program.
    pub program: &'a str,
    /// The plan's file in the store.
    pub plan: &'a Path,
    /// The store, on a file system shared by all nodes.
    pub store: &'a Path,
    /// Number of shards.
    pub shards: usize,
    /// Maximum number of shards that run at the same time, if limited.
    pub at_once: Option<usize>,
    /// CPUs for each shard.
    pub cpus: usize,
    /// More options of sbatch, one per line.
    pub options: &'a [String],
    /// Options for the output of the merge: `--parquet FILE`, and so on.
    pub merge: &'a [String],
}

/// Quotes a word for a shell.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

impl Slurm<'_> {
    /// Returns the script. Under `sbatch` the script runs the array; started by hand, it submits the array, and a merge that
    /// follows.
    pub fn script(&self) -> String {
        let path = |path: &Path| quoted(&path.display().to_string());
        let (program, store, plan) = (quoted(self.program), path(self.store), path(self.plan));
        let limit = self.at_once.map_or(String::new(), |most| format!("%{most}"));
        let options: String = self
            .options
            .iter()
            .map(|option| format!("#SBATCH {option}\n"))
            .collect();
        let result: String = self
            .merge
            .iter()
            .map(|word| format!(" {}", quoted(word)))
            .collect();
        let merge = quoted(&format!("{program} sweep merge {store}{result}"));
        let (shards, cpus) = (self.shards, self.cpus);
        format!(
            "#!/bin/sh\n\
             #SBATCH --job-name=homenode-sweep\n\
             #SBATCH --array=1-{shards}{limit}\n\
             #SBATCH --cpus-per-task={cpus}\n\
             #SBATCH --requeue\n\
             #SBATCH --output={}/slurm-%A_%a.log\n\
             {options}\
             # 'sh job.sh' submits the array, and the merge once all of it has succeeded. 'sbatch job.sh' submits the array alone;\n\
             # then merge by hand, which also says what is missing: {program} sweep merge {store}{result}\n\
             # A task that was cancelled or failed is taken up where it was: submit it again, or 'scontrol requeue' it.\n\
             set -eu\n\
             if [ -z \"${{SLURM_ARRAY_TASK_ID:-}}\" ]; then\n\
             \x20   array=$(sbatch --parsable \"$0\")\n\
             \x20   sbatch --dependency=\"afterok:${{array%%;*}}\" --job-name=homenode-merge --output={store}/slurm-merge.log --wrap {merge}\n\
             \x20   exit\n\
             fi\n\
             exec {program} sweep {plan} --store {store} --shard \"$SLURM_ARRAY_TASK_ID/{shards}\" --jobs \"${{SLURM_CPUS_PER_TASK:-{cpus}}}\"\n",
            self.store.display(),
        )
    }
}
