//! Disks of machines: images, overlays, and the archive that carries files into a machine.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Spec;
use crate::programs::run;

/// The size of the second disk. Always the same, since a snapshot remembers it.
pub(super) const PAYLOAD_BYTES: u64 = 1 << 29;

/// A disk image.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(super) path: PathBuf,
    format: &'static str,
}

impl Disk {
    /// An image without a format.
    pub fn raw(path: PathBuf) -> Self {
        Self {
            path,
            format: "raw",
        }
    }

    /// QEMU's own format, which holds the difference to another image.
    pub fn qcow2(path: PathBuf) -> Self {
        Self {
            path,
            format: "qcow2",
        }
    }

    /// Makes an image that begins as this one and takes the writes; this one stays as it is.
    ///
    /// # Errors
    /// With the words of `qemu-img`.
    pub fn overlay(&self, path: &Path) -> io::Result<Self> {
        run(Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", self.format, "-b"])
            .arg(&self.path)
            .arg(path))?;
        Ok(Self::qcow2(path.to_owned()))
    }

    /// Writes the whole content, with that of all images below, into one raw file with holes.
    ///
    /// # Errors
    /// With the words of `qemu-img`.
    pub fn flatten(&self, path: &Path) -> io::Result<Self> {
        run(Command::new("qemu-img")
            .args(["convert", "-f", self.format, "-O", "raw"])
            .arg(&self.path)
            .arg(path))?;
        Ok(Self::raw(path.to_owned()))
    }
}

/// Packs the files of a directory into an archive that is a machine's second disk
/// ([`Machine::unpack_payload`](super::Machine::unpack_payload)).
///
/// # Errors
/// When the files cannot be read, or are more than the disk holds.
pub fn payload(files: &Path, archive: &Path) -> io::Result<()> {
    run(Command::new("tar")
        .arg("-C")
        .arg(files)
        .arg("-cf")
        .arg(archive)
        .arg("."))?;
    let file = fs::OpenOptions::new().write(true).open(archive)?;
    let size = file.metadata()?.len();
    if size > PAYLOAD_BYTES {
        return Err(io::Error::other(format!(
            "{} is {size} bytes; the disk of a machine for it holds {PAYLOAD_BYTES}",
            archive.display()
        )));
    }
    file.set_len(PAYLOAD_BYTES)
}

/// QEMU's arguments for both disks. Flushes of the machine are not passed on to the host: no test needs what a crash of
/// the host would leave, and they would cost most of the time.
pub(super) fn arguments(spec: &Spec, empty: &Path) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut node = |text: String| {
        arguments.push("-blockdev".to_owned());
        arguments.push(text);
    };
    node(format!(
        "driver=file,node-name=root-file,filename={},cache.no-flush=on",
        spec.disk.path.display()
    ));
    node(format!(
        "driver={},node-name=root-image,file=root-file,cache.no-flush=on",
        spec.disk.format
    ));
    let root = match &spec.record {
        Some(log) => {
            node(format!(
                "driver=file,node-name=log-file,filename={},cache.no-flush=on",
                log.display()
            ));
            // The number of entries in the log's header is kept current.
            node(
                "driver=blklogwrites,node-name=root-log,file=root-image,log=log-file,log-sector-size=512,\
                 log-super-update-interval=1"
                    .to_owned(),
            );
            "root-log"
        }
        None => "root-image",
    };
    node(format!(
        "driver=raw,node-name=payload,read-only=on,file.driver=file,file.filename={}",
        spec.payload.as_deref().unwrap_or(empty).display()
    ));
    for device in [
        format!("virtio-blk-pci,drive={root},id=disk0"),
        "virtio-blk-pci,drive=payload,id=disk1".to_owned(),
    ] {
        arguments.push("-device".to_owned());
        arguments.push(device);
    }
    arguments
}
