//! Committed measurements of programs under the emulator's plugin. To measure takes half an hour, and needs packages that a
//! machine for reproducing claims may lack.
//!
//! *PRL*, page-reference logging, is a proposed extension of processors: they log which pages of a guest are used, whereas PML,
//! the existing page-modification logging, logs which are written.

use homenode_machine_files::file::{FileError, read_toml};
use serde::{Deserialize, Serialize};
use toml_edit::Item;

/// Path of the measurement of programs.
pub const PROGRAMS_FILE: &str = "data/measured/page-log-programs.toml";
/// The measurement of programs, as committed.
pub const PROGRAMS: &str = include_str!("../../../data/measured/page-log-programs.toml");
/// Version of the format.
const VERSION: u32 = 1;

/// Measurements of programs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    version: u32,
    /// The emulator.
    pub qemu: String,
    /// The guest's kernel.
    pub kernel: String,
    /// The core whose TLBs were modelled.
    pub core: String,
    /// Number of intervals (mu) that a run was divided into.
    pub intervals: u64,
    /// The programs.
    pub program: Vec<Program>,
}

/// A program, measured from start to end. Page counts are of distinct pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// The program's name in this project.
    pub name: String,
    /// Whether the program is part of PARSEC.
    pub parsec: bool,
    /// The Debian package, with its version.
    pub package: String,
    /// The command line.
    pub command: String,
    /// Duration on the emulated clock.
    pub seconds: f64,
    /// Pages that the program read or wrote.
    pub used: u64,
    /// Used pages that the program or the kernel wrote.
    pub written: u64,
    /// Used pages that PRL logged.
    pub logged: u64,
    /// Pages that the program only executed.
    pub code: u64,
    /// Pages used only by the kernel.
    pub kernel: u64,
    /// Pages used in an interval, summed over all intervals.
    pub intervals_used: u64,
    /// Pages written in an interval, summed over all intervals.
    pub intervals_written: u64,
    /// Pages logged in an interval, summed over all intervals.
    pub intervals_logged: u64,
    /// PRL's estimate by the paper's rule.
    pub prl: Prl,
    /// PRL's estimate by the repaired rule.
    pub prl_repaired: Prl,
}

/// An estimate of the hot pages by PRL.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Prl {
    /// Whether PRL's loop ended by its own rule, rather than with the run.
    pub settled: bool,
    /// Intervals until the loop ended.
    pub after: f64,
    /// The program's pages that PRL calls hot.
    pub hot: u64,
    /// Pages that the program used until the loop ended.
    pub used: u64,
    /// The kernel's pages that PRL calls hot.
    pub kernel: u64,
}

/// Why a measurement cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MeasuredError {
    /// The file does not parse.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file has another version.
    #[error(
        "{path}: the measurement has version {found}, but this program reads {VERSION}; measure again as the top of the file says"
    )]
    Version {
        /// Path of the file.
        path: String,
        /// The file's version.
        found: u32,
    },
    /// A part is larger than the whole.
    #[error("{path}: {program} has more {part} than {whole}; measure again as the top of the file says")]
    Larger {
        /// Path of the file.
        path: String,
        /// Name of the program.
        program: String,
        /// The part.
        part: &'static str,
        /// The whole.
        whole: &'static str,
    },
}

impl Measured {
    /// Creates a measurement of this version.
    pub fn new(
        qemu: String,
        kernel: String,
        core: String,
        intervals: u64,
        program: Vec<Program>,
    ) -> Measured {
        Measured {
            version: VERSION,
            qemu,
            kernel,
            core,
            intervals,
            program,
        }
    }

    /// Parses a measurement.
    ///
    /// # Errors
    /// If the text does not parse, has another version, or contradicts itself.
    pub fn parse(path: &str, text: &str) -> Result<Measured, MeasuredError> {
        let measured: Measured = read_toml(path, text)?;
        let path = path.to_owned();
        if measured.version != VERSION {
            return Err(MeasuredError::Version {
                path,
                found: measured.version,
            });
        }
        for program in &measured.program {
            let parts = [
                (program.written, "pages written", program.used, "pages used"),
                (program.logged, "pages logged", program.used, "pages used"),
                (
                    program.intervals_written,
                    "pages written in intervals",
                    program.intervals_used,
                    "pages used in them",
                ),
                (
                    program.intervals_logged,
                    "pages logged in intervals",
                    program.intervals_used,
                    "pages used in them",
                ),
            ];
            if let Some((_, part, _, whole)) = parts.into_iter().find(|(part, _, whole, _)| part > whole) {
                let program = program.name.clone();
                return Err(MeasuredError::Larger {
                    path,
                    program,
                    part,
                    whole,
                });
            }
        }
        Ok(measured)
    }

    /// Formats the measurement as a file.
    pub fn to_toml(&self) -> String {
        let mut rounded = self.clone();
        for program in &mut rounded.program {
            let figures = [
                &mut program.seconds,
                &mut program.prl.after,
                &mut program.prl_repaired.after,
            ];
            figures
                .into_iter()
                .for_each(|figure| *figure = (*figure * 10.0).round() / 10.0);
        }
        let mut document = toml_edit::ser::to_document(&rounded).expect("nothing here is beyond TOML");
        // Writes each program as a table of its own, with nested tables inline.
        let programs = std::mem::take(&mut document["program"]);
        document["program"] = programs
            .into_array_of_tables()
            .map_or_else(|same| same, Item::ArrayOfTables);
        format!("{HEAD}{document}")
    }
}

const HEAD: &str = "# What programs of Debian 12 use and write of their memory, in pages of 4 KiB, and what PRL makes of them: data, without pages that
# are only executed. `intervals_` sums are over the intervals that a run was divided into. docs/WORKING_SET.md shows it as a table.
# Made by the testbed's case page-log-programs (a quarter of an hour); counts differ a little from run to run, since the emulated
# clock is the machine's:
#   scripts/testbed-setup.sh --programs && cargo xtask testbed page-log-programs && cp target/testbed/page-log-programs.toml data/measured/
";

#[cfg(test)]
mod tests {
    use super::*;

    fn committed() -> Measured {
        Measured::parse(PROGRAMS_FILE, PROGRAMS).expect("it is committed")
    }

    #[test]
    fn what_is_committed_is_what_the_case_writes() {
        assert_eq!(committed().to_toml(), PROGRAMS);
    }

    #[test]
    fn another_version_an_unknown_key_and_a_part_above_its_whole_are_refused() {
        let later = PROGRAMS.replacen("version = 1", "version = 2", 1);
        let error = Measured::parse("x.toml", &later).expect_err("a later version");
        assert!(
            matches!(error, MeasuredError::Version { found: 2, .. }),
            "{error}"
        );
        let unknown = PROGRAMS.replacen("core = ", "cores = ", 1);
        let error = Measured::parse("x.toml", &unknown).expect_err("an unknown key");
        assert!(error.to_string().contains("cores"), "{error}");
        let mut measured = committed();
        measured.program[0].written = measured.program[0].used + 1;
        let error = Measured::parse("x.toml", &measured.to_toml()).expect_err("more written than used");
        assert!(matches!(error, MeasuredError::Larger { .. }), "{error}");
    }
}
