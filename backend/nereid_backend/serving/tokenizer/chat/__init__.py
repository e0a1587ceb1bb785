# SPDX-License-Identifier: Apache-2.0
"""Chat messages and tools: conversion to the form that the chat template reads, and rendering."""
