//! Space and traffic on disks.

use std::collections::BTreeMap;

use super::super::exposition::{Exposition, Kind};
use super::super::model::{DeviceNumber, DiskIo};
use super::super::resource::number;
use super::super::storage::Storage;
use super::{Series, with};

/// Writes the space that containers take of the file system below their writable layers.
pub(super) fn space(text: &mut Exposition, series: &[Series<'_>], storage: Option<&Storage>) {
    let Some(images) = storage.and_then(|s| s.containers_fs.as_ref().or(s.images.as_ref())) else {
        return;
    };
    let device = [("device", images.device.as_str())];
    let used = |of: &Series<'_>| of.storage?.rootfs.map(|(bytes, _)| number(bytes));
    let limit = |of: &Series<'_>| images.capacity.filter(|_| used(of).is_some()).map(number);
    let inodes = |of: &Series<'_>| of.storage?.rootfs?.1.map(number);
    type Read<'a> = &'a dyn Fn(&Series<'_>) -> Option<f64>;
    let families: [(&str, &str, Read<'_>); 3] = [
        (
            "container_fs_usage_bytes",
            "Number of bytes that are consumed by the container on this filesystem.",
            &used,
        ),
        (
            "container_fs_limit_bytes",
            "Number of bytes that can be consumed by the container on this filesystem.",
            &limit,
        ),
        (
            "container_fs_inodes_used",
            "Number of inodes that are used by the container on this filesystem.",
            &inodes,
        ),
    ];
    for (name, help, read) in families {
        let mut family = text.family(name, Kind::Gauge, help);
        for of in series.iter().filter(|of| of.is_container) {
            if let Some(value) = read(of) {
                family.sample_at(&with(&of.labels, &device), value, Some(images.at_ms));
            }
        }
    }
}

/// Writes the bytes and operations of cgroups, by disk. A disk is called by its name in `/dev`; one that has just gone
/// has none and is left out. cAdvisor: `ioValues`.
pub(super) fn traffic(
    text: &mut Exposition,
    series: &[Series<'_>],
    devices: &BTreeMap<DeviceNumber, String>,
) {
    type Read = (&'static str, &'static str, fn(&DiskIo) -> u64);
    const READS: [Read; 4] = [
        (
            "container_fs_reads_bytes",
            "Bytes that the container has read from this disk",
            |disk| disk.read_bytes,
        ),
        (
            "container_fs_reads",
            "Reads from this disk that the container has had completed",
            |disk| disk.reads,
        ),
        (
            "container_fs_writes_bytes",
            "Bytes that the container has written to this disk",
            |disk| disk.written_bytes,
        ),
        (
            "container_fs_writes",
            "Writes to this disk that the container has had completed",
            |disk| disk.writes,
        ),
    ];
    let paths: BTreeMap<DeviceNumber, String> = (devices.iter())
        .map(|(number, name)| (*number, format!("/dev/{name}")))
        .collect();
    for (name, help, read) in READS {
        let mut family = text.family(name, Kind::Counter, help);
        for of in series {
            for disk in &of.usage.disks {
                let Some(path) = paths.get(&disk.device) else {
                    continue;
                };
                let labels = with(&of.labels, &[("device", path.as_str())]);
                family.sample_at(&labels, number(read(disk)), Some(of.usage.at_ms));
            }
        }
    }
}
