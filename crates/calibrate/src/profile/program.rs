//! Finds the program to profile, and checks that it can run here.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// Why a program cannot be profiled.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The file cannot be read.
    #[error("{}: {cause}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The file is not executable.
    #[error("{} is not an executable file: name a program", .0.display())]
    NotExecutable(PathBuf),
    /// The program is not in any directory of `PATH`.
    #[error("no program named `{}` is in PATH", .0.display())]
    NotInPath(OsString),
    /// The file is a script.
    #[error(
        "{file} is a script: profile its interpreter, as in 'homenode profile -- {interpreter} {file}'",
        file = .file.display()
    )]
    Script {
        /// The file.
        file: PathBuf,
        /// The script's interpreter.
        interpreter: String,
    },
    /// The program is for another processor.
    #[error(
        "{} is a {bits}-bit program for {machine}; this homenode profiles 64-bit programs for {}",
        .file.display(), HERE.1
    )]
    Foreign {
        /// The file.
        file: PathBuf,
        /// Number of bits in an address.
        bits: u8,
        /// Name of that processor.
        machine: String,
    },
    /// The file is neither an ELF program nor a script.
    #[error("{} is neither an ELF program nor a script", .0.display())]
    Unknown(PathBuf),
}

/// A program file.
pub struct Program {
    /// The program's file.
    pub path: PathBuf,
    /// The program's name, with only those characters that a workload's name may have.
    pub name: String,
}

/// ELF's number for this machine's architecture, and QEMU's name for it.
#[cfg(target_arch = "x86_64")]
pub(super) const HERE: (u16, &str) = (62, "x86_64");
/// ELF's number for this machine's architecture, and QEMU's name for it.
#[cfg(target_arch = "aarch64")]
pub const HERE: (u16, &str) = (183, "aarch64");

impl Program {
    /// Returns the program of a command. Searches `PATH` if the command has no slash.
    ///
    /// # Errors
    /// No such program, or no permission to execute it.
    pub fn find(command: &OsStr) -> Result<Program, ProgramError> {
        let path = if command.as_bytes().contains(&b'/') {
            let path = PathBuf::from(command);
            let found = match path.metadata() {
                Ok(found) => found,
                Err(cause) => return Err(ProgramError::Unreadable { file: path, cause }),
            };
            if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
                return Err(ProgramError::NotExecutable(path));
            }
            path
        } else {
            which::which(command).map_err(|_| ProgramError::NotInPath(command.to_owned()))?
        };
        let last = path.file_name().unwrap_or_default().to_string_lossy();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = last.chars().map(|c| if allowed(c) { c } else { '_' }).collect();
        Ok(Program { path, name })
    }

    /// Checks that the file is a program for this machine's architecture. # Errors
    ///
    /// If the file is of another kind; the error names the kind.
    pub fn runs_here(&self) -> Result<(), ProgramError> {
        let file = self.path.clone();
        let mut head = [0; 256];
        let read = match File::open(&file).and_then(|mut file| file.read(&mut head)) {
            Ok(read) => read,
            Err(cause) => return Err(ProgramError::Unreadable { file, cause }),
        };
        match kind(&head[..read]) {
            Kind::Here => Ok(()),
            Kind::Script(interpreter) => Err(ProgramError::Script { file, interpreter }),
            Kind::Foreign(bits, machine) => Err(ProgramError::Foreign { file, bits, machine }),
            Kind::Unknown => Err(ProgramError::Unknown(file)),
        }
    }
}

#[derive(Debug, PartialEq)]
enum Kind {
    Here,
    Script(String),
    Foreign(u8, String),
    Unknown,
}

/// Returns the kind of a file according to its first bytes.
fn kind(head: &[u8]) -> Kind {
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        return Kind::Script(String::from_utf8_lossy(line).trim().to_owned());
    }
    let [0x7f, b'E', b'L', b'F', class, data, ..] = head else {
        return Kind::Unknown;
    };
    let Some(machine) = head.get(18..20) else {
        return Kind::Unknown;
    };
    let machine = [machine[0], machine[1]];
    let machine = if *data == 2 {
        u16::from_be_bytes(machine)
    } else {
        u16::from_le_bytes(machine)
    };
    let bits = if *class == 2 { 64 } else { 32 };
    if (bits, machine) == (64, HERE.0) {
        return Kind::Here;
    }
    let name = match machine {
        3 => "x86".to_owned(),
        20 | 21 => "PowerPC".to_owned(),
        22 => "S/390".to_owned(),
        40 => "ARM".to_owned(),
        62 => "x86_64".to_owned(),
        183 => "aarch64".to_owned(),
        243 => "RISC-V".to_owned(),
        other => format!("ELF machine {other}"),
    };
    Kind::Foreign(bits, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(class: u8, data: u8, machine: [u8; 2]) -> Vec<u8> {
        let mut head = vec![
            0x7f, b'E', b'L', b'F', class, data, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0,
        ];
        head.extend(machine);
        head
    }

    #[test]
    fn a_file_is_known_by_its_first_bytes() {
        assert_eq!(kind(&elf(2, 1, HERE.0.to_le_bytes())), Kind::Here);
        assert_eq!(kind(&elf(1, 1, [3, 0])), Kind::Foreign(32, "x86".into()));
        assert_eq!(kind(&elf(2, 2, [0, 22])), Kind::Foreign(64, "S/390".into()));
        assert_eq!(kind(b"#! /bin/sh -e\necho"), Kind::Script("/bin/sh -e".into()));
        for head in [&b""[..], b"MZ", b"\x7fELF", &elf(2, 1, [62, 0])[..19]] {
            assert_eq!(kind(head), Kind::Unknown);
        }
    }
}
