//! The guests' kernel and initramfs.
//!
//! The kernel is the host's stock kernel without its compression. QEMU boots an uncompressed vmlinux a third faster, which
//! matters when every instruction is emulated. The initramfs contains one static program and a few modules.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use homenode_formats::cpio::Archive;

/// The modules, in the order in which they must be loaded.
const MODULES: [&str; 6] = [
    "virtio/virtio_ring",
    "virtio/virtio",
    "virtio/virtio_pci_legacy_dev",
    "virtio/virtio_pci_modern_dev",
    "virtio/virtio_pci",
    "virtio/virtio_balloon",
];
/// Drivers for a domU's devices, loaded on command.
const DEVICES: [&str; 2] = ["block/xen-blkfront", "net/xen-netfront"];
const TARGET: &str = "x86_64-unknown-linux-gnu";
const STOCK_PREFIX: &str = "vmlinuz-6.1.";

/// A stock kernel of this machine: its image and its release.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The compressed image, for the emulated host.
    pub image: PathBuf,
    /// The kernel's release, from `uname -r`.
    pub release: String,
}

impl Kernel {
    /// Returns the directory of the headers with which modules for this kernel are built.
    #[must_use]
    pub fn headers(&self) -> PathBuf {
        PathBuf::from(format!("/usr/src/linux-headers-{}", self.release))
    }

    /// Finds the newest stock 6.1 kernel that has its modules.
    ///
    /// # Errors
    /// When there is none.
    pub fn find() -> anyhow::Result<Self> {
        let mut found: Vec<(u32, Self)> = Vec::new();
        for entry in fs::read_dir("/boot").context("cannot list /boot")?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(release) = name.strip_prefix("vmlinuz-") else {
                continue;
            };
            if !name.starts_with(STOCK_PREFIX) || !Path::new("/lib/modules").join(release).is_dir() {
                continue;
            }
            let build = release
                .split('-')
                .nth(1)
                .and_then(|text| text.parse().ok())
                .unwrap_or(0);
            found.push((
                build,
                Self {
                    image: entry.path(),
                    release: release.to_owned(),
                },
            ));
        }
        found.sort_by_key(|(build, _)| *build);
        let (_, kernel) = found.pop().context(
            "no stock 6.1 kernel with its modules in /boot and /lib/modules: run scripts/testbed-setup.sh",
        )?;
        Ok(kernel)
    }

    /// Returns the uncompressed kernel, which is unpacked into `cache` once per release.
    ///
    /// # Errors
    /// When the image is not an x86 boot image with an xz payload, or `xz` fails.
    pub fn unpack(&self, cache: &Path) -> anyhow::Result<PathBuf> {
        let target = cache.join(format!("vmlinux-{}", self.release));
        if target.exists() {
            return Ok(target);
        }
        let image = fs::read(&self.image).with_context(|| format!("cannot read {}", self.image.display()))?;
        let payload =
            xz_payload(&image).with_context(|| format!("cannot unpack {}", self.image.display()))?;
        let partial = cache.join(format!("vmlinux-{}.{}", self.release, std::process::id()));
        let output =
            fs::File::create(&partial).with_context(|| format!("cannot write {}", partial.display()))?;
        // Only one stream is unpacked: four bytes that state the size follow it.
        let mut xz = Command::new("xz")
            .args(["--decompress", "--stdout", "--single-stream"])
            .stdin(Stdio::piped())
            .stdout(output)
            .spawn()
            .context("cannot start xz: run scripts/testbed-setup.sh")?;
        let fed = xz.stdin.take().map(|mut input| input.write_all(payload));
        let status = xz.wait().context("cannot wait for xz")?;
        if !status.success() || !matches!(fed, Some(Ok(()))) {
            let _ = fs::remove_file(&partial);
            bail!("xz could not unpack {}: {status}", self.image.display());
        }
        fs::rename(&partial, &target).with_context(|| format!("cannot rename {}", partial.display()))?;
        Ok(target)
    }
}

/// Returns the compressed kernel inside an x86 boot image (boot protocol 2.08: payload_offset, payload_length).
fn xz_payload(image: &[u8]) -> anyhow::Result<&[u8]> {
    let field = |at: usize| -> anyhow::Result<usize> {
        let bytes = image
            .get(at..at + 4)
            .context("the file is too short for a boot image")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    ensure!(image.get(0x202..0x206) == Some(b"HdrS"), "no x86 boot header");
    let setup_sectors = match image[0x1f1] {
        0 => 4,
        count => usize::from(count),
    };
    let begin = (setup_sectors + 1) * 512 + field(0x248)?;
    let payload = image
        .get(begin..begin + field(0x24c)?)
        .context("the payload ends after the file")?;
    ensure!(
        payload.starts_with(b"\xfd7zXZ\0"),
        "the payload is not compressed with xz"
    );
    Ok(payload)
}

/// Builds the guest's static init, and packs it into `target` with its modules and the topology page's module.
///
/// # Errors
/// When cargo fails or a file is missing.
pub fn build_initramfs(
    workspace: &Path,
    kernel: &Kernel,
    topology_module: &Path,
    build_dir: &Path,
    target: &Path,
) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(workspace)
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "homenode-testbed-guest",
            "--target",
            TARGET,
        ])
        .args(["--config", "profile.release.strip=\"symbols\"", "--target-dir"])
        .arg(build_dir)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .context("cannot start cargo to build the guest's init")?;
    ensure!(
        status.success(),
        "cargo could not build homenode-testbed-guest: {status}"
    );

    let init = build_dir.join(TARGET).join("release/homenode-testbed-guest");
    let mut archive = Archive::default();
    archive.file(
        "init",
        0o755,
        &fs::read(&init).with_context(|| format!("cannot read {}", init.display()))?,
    );
    // The mount points and the directory of the modules must be there before init runs.
    for dir in ["dev", "proc", "sys", "modules", "devices", "topology"] {
        archive.directory(dir);
    }
    let mut add = |module: &str, place: &str| {
        let path = PathBuf::from(format!(
            "/lib/modules/{}/kernel/drivers/{module}.ko",
            kernel.release
        ));
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.file(&format!("{place}{name}.ko"), 0o644, &bytes);
        anyhow::Ok(())
    };
    for (number, module) in MODULES.iter().enumerate() {
        add(module, &format!("modules/{number}-"))?;
    }
    for module in DEVICES {
        add(module, "devices/")?;
    }
    let bytes =
        fs::read(topology_module).with_context(|| format!("cannot read {}", topology_module.display()))?;
    archive.file("topology/homenode_topology.ko", 0o644, &bytes);
    fs::write(target, archive.finish()).with_context(|| format!("cannot write {}", target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_file_is_no_kernel() {
        let error = xz_payload(&[b'x'; 4096])
            .map(<[u8]>::len)
            .map_err(|error| error.to_string());
        assert_eq!(error, Err("no x86 boot header".to_owned()));
    }
}
