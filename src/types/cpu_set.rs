//! A set of logical CPUs or NUMA nodes, and its text as the kernel writes it: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Highest number that a set may contain; far above what a kernel supports.
const MAX_NUMBER: u32 = 65_535;

/// Numbers of CPUs, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CpuSet(BTreeSet<u32>);

/// Text that is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a list of CPUs; write it like \"0-3,8\"")]
pub struct CpuSetError {
    text: String,
}

impl CpuSet {
    /// Returns the empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns how many CPUs the set has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the set has this CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Iterates from the lowest number.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Returns the CPUs of both sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    /// Returns the CPUs that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// Returns the CPUs that are in both sets.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Returns whether both sets have a CPU in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        !self.0.is_disjoint(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl Extend<u32> for CpuSet {
    fn extend<T: IntoIterator<Item = u32>>(&mut self, cpus: T) {
        self.0.extend(cpus);
    }
}

impl fmt::Display for CpuSet {
    /// Writes ranges in order, as upstream's `CPUSet.String`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (at, (first, last)) in ranges.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    /// Reads numbers and ranges separated by commas; upstream's `cpuset.Parse`. Blank text is the empty set.
    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError {
            text: text.to_owned(),
        };
        let number = |text: &str| {
            let number = text.parse::<u32>().ok();
            number.filter(|n| *n <= MAX_NUMBER).ok_or_else(bad)
        };
        let mut set = BTreeSet::new();
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Ok(Self::new());
        }
        for part in trimmed.split(',') {
            match part.split_once('-') {
                None => {
                    set.insert(number(part)?);
                }
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if first > last {
                        return Err(bad());
                    }
                    set.extend(first..=last);
                }
            }
        }
        Ok(Self(set))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_read_back_as_they_are_written() {
        for (text, shown) in [
            ("0-3,8", "0-3,8"),
            ("3,1,2", "1-3"),
            ("\n", ""),
            ("5", "5"),
            ("0,2,4-5\n", "0,2,4-5"),
        ] {
            let set: CpuSet = text.parse().unwrap();
            assert_eq!(set.to_string(), shown, "{text:?}");
            assert_eq!(shown.parse(), Ok(set));
        }
        for text in ["a", "3-1", "1,", "-1", "0-99999999", "1 2"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text:?}");
        }
    }
}
