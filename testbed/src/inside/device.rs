//! A PCI device for a guest. The emulated host has a spare device behind a bridge of its own on node [`DEVICE_NODE`], and an
//! IOMMU.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::outside::emulated::DEVICE_NODE;

/// Vendor and device of `edu`, QEMU's device for teaching.
const EDU: [&str; 2] = ["0x1234", "0x11e8"];
const DEVICES: &str = "/sys/bus/pci/devices";

/// The device, once VFIO is its driver.
#[derive(Debug)]
pub struct Device {
    /// The address, such as `0000:40:00.0`.
    pub address: String,
}

impl Device {
    /// Finds the device and binds it to VFIO.
    ///
    /// # Errors
    /// When the device is missing or not on its node, or VFIO does not take it.
    pub fn take() -> anyhow::Result<Device> {
        let names = fs::read_dir(DEVICES)?.flatten().map(|entry| entry.path());
        let is_it = |path: &PathBuf| {
            let said = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
            [said("vendor").trim(), said("device").trim()] == EDU
        };
        let path = names
            .into_iter()
            .find(is_it)
            .context("the host has no spare device")?;
        let node = fs::read_to_string(path.join("numa_node"))?;
        ensure!(
            node.trim() == DEVICE_NODE.to_string(),
            "expected the device on node {DEVICE_NODE}, saw {}",
            node.trim()
        );
        let status = std::process::Command::new("modprobe").arg("vfio-pci").status()?;
        ensure!(status.success(), "modprobe vfio-pci: {status}");
        // The emulated IOMMU does not remap interrupts, which would need another interrupt controller; so VFIO must allow
        // that.
        let unsafe_interrupts = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
        fs::write(unsafe_interrupts, "1").context(unsafe_interrupts)?;
        let address = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        fs::write(path.join("driver_override"), "vfio-pci")?;
        fs::write("/sys/bus/pci/drivers_probe", &address)?;
        let driver = fs::read_link(path.join("driver")).context("the device has no driver")?;
        ensure!(
            driver.ends_with("vfio-pci"),
            "expected VFIO's driver, saw {}",
            driver.display()
        );
        Ok(Device { address })
    }

    /// Returns the device's domain, bus, slot and function, as libvirt's XML has them.
    #[must_use]
    pub fn hostdev(&self) -> String {
        let parts: Vec<&str> = self.address.split([':', '.']).collect();
        let [domain, bus, slot, function] = parts.as_slice() else {
            return String::new();
        };
        format!(
            "<hostdev mode='subsystem' type='pci' managed='no'><source>\
             <address domain='0x{domain}' bus='0x{bus}' slot='0x{slot}' function='0x{function}'/></source></hostdev>"
        )
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let driver = Path::new("/sys/bus/pci/drivers/vfio-pci/unbind");
        let _ = fs::write(driver, &self.address);
    }
}
