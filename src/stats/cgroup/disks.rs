//! Reads and writes of cgroups, as the kernel reports them: `io.stat` of version 2, `blkio.*` of version 1.

use std::collections::BTreeMap;

use super::super::model::{DeviceNumber, DiskIo};

/// Files of version 1 that count operations and bytes. Which ones count depends on the scheduler of the disk; the first
/// pair that counts anything is the one to read.
const BLKIO: [(&str, &str); 4] = [
    (
        "blkio.bfq.io_serviced_recursive",
        "blkio.bfq.io_service_bytes_recursive",
    ),
    (
        "blkio.io_serviced_recursive",
        "blkio.io_service_bytes_recursive",
    ),
    (
        "blkio.throttle.io_serviced_recursive",
        "blkio.throttle.io_service_bytes_recursive",
    ),
    (
        "blkio.throttle.io_serviced",
        "blkio.throttle.io_service_bytes",
    ),
];

/// Reads `io.stat`: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 …`. A device without figures is left out; some kernels put the
/// next one on its line.
pub(super) fn io_stat(text: &str) -> Vec<DiskIo> {
    let mut disks: BTreeMap<DeviceNumber, DiskIo> = BTreeMap::new();
    let mut device = None;
    for word in text.split_whitespace() {
        let Some((key, value)) = word.split_once('=') else {
            device = number_of(word);
            continue;
        };
        let (Some(device), Ok(value)) = (device, value.parse()) else {
            continue;
        };
        let disk = disks.entry(device).or_insert_with(|| new(device));
        match key {
            "rbytes" => disk.read_bytes = value,
            "wbytes" => disk.written_bytes = value,
            "rios" => disk.reads = value,
            "wios" => disk.writes = value,
            _ => {}
        }
    }
    disks.into_values().collect()
}

/// Reads the files of version 1 that count, lines `8:0 Read 1`; `file` gives the content of one.
pub(super) fn blkio(file: impl Fn(&str) -> Option<String>) -> Vec<DiskIo> {
    for (operations, bytes) in BLKIO {
        let Some(operations) = file(operations).filter(|text| text.contains(':')) else {
            continue;
        };
        let mut disks: BTreeMap<DeviceNumber, DiskIo> = BTreeMap::new();
        for (device, operation, count) in entries(&operations) {
            let disk = disks.entry(device).or_insert_with(|| new(device));
            match operation {
                "Read" => disk.reads = count,
                "Write" => disk.writes = count,
                _ => {}
            }
        }
        for (device, operation, count) in entries(&file(bytes).unwrap_or_default()) {
            let disk = disks.entry(device).or_insert_with(|| new(device));
            match operation {
                "Read" => disk.read_bytes = count,
                "Write" => disk.written_bytes = count,
                _ => {}
            }
        }
        return disks.into_values().collect();
    }
    Vec::new()
}

/// Device, operation and count of each line; the sum in the last line has no device.
fn entries(text: &str) -> impl Iterator<Item = (DeviceNumber, &str, u64)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (device, operation, count) = (words.next()?, words.next()?, words.next()?);
        Some((number_of(device)?, operation, count.parse().ok()?))
    })
}

fn new(device: DeviceNumber) -> DiskIo {
    DiskIo {
        device,
        ..DiskIo::default()
    }
}

fn number_of(word: &str) -> Option<DeviceNumber> {
    let (major, minor) = word.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn disk(device: DeviceNumber, counts: [u64; 4]) -> DiskIo {
        let [reads, read_bytes, writes, written_bytes] = counts;
        DiskIo {
            device,
            reads,
            read_bytes,
            writes,
            written_bytes,
        }
    }

    #[test]
    fn io_stat_is_read_by_device() {
        let text = "259:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=512 dios=1 cost.usage=7\n\
                    8:16 rbytes=100 wbytes=0 rios=3 wios=0 dbytes=0 dios=0\n";
        let expected = [
            disk((8, 16), [3, 100, 0, 0]),
            disk((259, 0), [1, 4096, 2, 8192]),
        ];
        assert_eq!(io_stat(text), expected);
        assert_eq!(io_stat(""), []);
    }

    #[test]
    fn io_stat_leaves_out_a_device_without_figures_wherever_its_line_ends() {
        for text in [
            "253:0 8:0 rbytes=1 wbytes=2 rios=3 wios=4\n",
            "253:0 \n8:0 rbytes=1 wbytes=2 rios=3 wios=4\n",
            "nonsense rbytes=9\n8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=x\n",
        ] {
            assert_eq!(io_stat(text), [disk((8, 0), [3, 1, 4, 2])], "{text}");
        }
    }

    const SERVICED: &str =
        "8:0 Read 5\n8:0 Write 6\n8:0 Sync 9\n8:0 Async 2\n8:0 Total 11\nTotal 11\n";
    const BYTES: &str = "8:0 Read 50\n8:0 Write 60\n8:0 Total 110\n8:16 Read 70\nTotal 180\n";

    #[test]
    fn blkio_reads_the_first_files_that_count() {
        let (throttle, other) = ("blkio.throttle.io_serviced_recursive", "Total 0\n");
        let file = |name: &str| match name {
            "blkio.bfq.io_serviced_recursive" => Some(other.to_owned()),
            name if name == throttle => Some(SERVICED.to_owned()),
            "blkio.throttle.io_service_bytes_recursive" => Some(BYTES.to_owned()),
            "blkio.throttle.io_serviced" => Some("8:0 Read 1000\n".to_owned()),
            _ => None,
        };
        let expected = [disk((8, 0), [5, 50, 6, 60]), disk((8, 16), [0, 70, 0, 0])];
        assert_eq!(blkio(file), expected);
        assert_eq!(blkio(|_| None), []);
        assert_eq!(blkio(|_| Some(other.to_owned())), []);
    }
}
